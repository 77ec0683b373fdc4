"""Secrets of a config are nowhere to be read: not in what is saved, tracked or printed, nor in what an error says."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from rich.console import Console

from megarl.cli import main
from megarl.cli.commands import reported
from megarl.config import config_fields, load_config, parse_config, save_resolved, to_yaml
from megarl.config.secrets import references, without_secrets
from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Sample
from megarl.errors import ConfigError, RewardError, WorkerError
from megarl.experience.samples_file import SamplesFile
from megarl.launch.doctor import Finding, render
from megarl.observe.phases import Phases
from megarl.observe.progress import Progress
from megarl.options.telemetry.trackers import open_trackers
from megarl.rewards import build_rewards
from megarl.rewards.http_post import Endpoint
from megarl.rollout.engines.sglang.server_process import ServerProcess
from megarl.runs.marks import RunMarks
from megarl.runs.provenance import CONFIG, provenance
from megarl.runs.resuming import differences_at_resume
from megarl.runs.run_checkpoint import CheckpointFolder, write_state
from megarl.runs.saving import Saving
from megarl.supervise.child_run import StatusPipe
from megarl.system.redaction import is_secret, redacted_data

ROOT = Path(__file__).parents[3]
KEY, PASSWORD = "sk-verysecretverysecret", "hunter22"
TREE: dict[str, Any] = {
    "run": {"name": "r"},
    "model": {"path": "nowhere"},
    "data": {"train": {"name": "basic_arithmetic", "args": {"password": PASSWORD, "max_terms": 2}}},
    "rollout": {"engine_args": {"api_key": KEY, "max_total_tokens": 1000}},
    "rewards": [
        {"name": "http", "args": {"url": f"https://me:{PASSWORD}@host/score", "timeout_s": 3}},
        {"name": "a.b:c", "args": {"headers": {"X-Api-Key": KEY}, "note": f"use Bearer {KEY}", "api_key_env": "JUDGE_KEY"}},
    ],
}


def test_a_saved_config_keeps_everything_but_secrets(tmp_path: Path) -> None:
    config = parse_config(TREE)
    save_resolved(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert KEY not in text
    assert PASSWORD not in text
    for kept in ("host/score", "timeout_s: 3", "JUDGE_KEY", "max_terms: 2", "max_total_tokens: 1000"):
        assert kept in text
    assert config.rollout.engine_args["api_key"] == KEY  # the run itself has it
    names = references(yaml.safe_load(text))
    assert set(names) >= {"MEGARL_DATA_TRAIN_ARGS_PASSWORD", "MEGARL_ROLLOUT_ENGINE_ARGS_API_KEY", "MEGARL_REWARDS_0_ARGS_URL"}
    first_line = text.splitlines()[0]
    assert first_line.startswith("# To be in the environment of a run that reads this file: ")
    assert all(f"{name} ({place})" in first_line for name, place in names.items())
    with pytest.raises(ConfigError, match=rf"needs the environment variables {', '.join(names)}: set what is missing, or"):
        load_config(tmp_path / "config.yaml")
    with pytest.raises(
        ConfigError, match=r"rewards\[0\]\.args\.api_key is '\(hidden\)', which stands for a secret: .* given again"
    ):
        parse_config(TREE | {"rewards": [{"name": "a.b:c", "args": {"api_key": "(hidden)"}}]})  # saved by an earlier version


def test_a_saved_config_reads_back_where_the_environment_has_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(TREE)
    save_resolved(config, tmp_path / "config.yaml")
    values = {
        "MEGARL_DATA_TRAIN_ARGS_PASSWORD": PASSWORD,
        "MEGARL_ROLLOUT_ENGINE_ARGS_API_KEY": KEY,
        "MEGARL_REWARDS_0_ARGS_URL": f"me:{PASSWORD}",
        "MEGARL_REWARDS_1_ARGS_HEADERS_X_API_KEY": KEY,
        "MEGARL_REWARDS_1_ARGS_NOTE": KEY,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    again = load_config(tmp_path / "config.yaml")
    assert again.model_dump() == config.model_dump()
    assert references(yaml.safe_load(to_yaml(again))).keys() == values.keys()


def test_a_config_names_variables_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, header = "https://judge/score?token=${JUDGE_TOKEN}&v=1", {"Authorization": "Token ${JUDGE_TOKEN}"}
    args = {"url": url, "headers": header, "prompt": "say ${HOME}", "tokens": ["${JUDGE_TOKEN}"], "max_tokens": 5}
    tree = TREE | {"rewards": [{"name": "a.b:c", "args": args}]}
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"^rewards\[0\]\.args\.url needs the environment variable JUDGE_TOKEN: set"):
        parse_config(tree)
    monkeypatch.setenv("JUDGE_TOKEN", "abcd-1234-efgh")
    read = parse_config(tree).rewards[0].args
    assert read["url"] == "https://judge/score?token=abcd-1234-efgh&v=1"
    assert read["headers"] == {"Authorization": "Token abcd-1234-efgh"}
    assert read["prompt"] == "say ${HOME}"
    saved = yaml.safe_load(to_yaml(parse_config(tree)))["rewards"][0]["args"]
    assert "abcd-1234-efgh" not in json.dumps(saved)
    assert saved["url"] == "https://judge/score?token=${JUDGE_TOKEN}&v=${MEGARL_REWARDS_0_ARGS_URL_2}"
    assert saved["tokens"] == ["${JUDGE_TOKEN}"]
    assert saved["max_tokens"] == 5


NAMES = "secret_key pwd passphrase cookie jwt auth tokens Set-Cookie apiKey client-secret DB_PASSWORD x-auth-token"
NO_NAMES = "stop_token_ids max_tokens max_new_tokens eos_token token_env api_key_env key prompt_key PWD"


def test_names_of_secrets() -> None:
    assert [name for name in NAMES.split() if not is_secret(name)] == []
    assert [name for name in NO_NAMES.split() if is_secret(name)] == []
    tree = {"auth": {"user": "u", "pin": "p4ss"}, "tokens": [{"of": "t0k"}], "cookie": True, "token": 5, "password": 12345}
    assert without_secrets(tree, "a") == {
        "auth": {"user": "${MEGARL_A_AUTH_USER}", "pin": "${MEGARL_A_AUTH_PIN}"},
        "tokens": [{"of": "${MEGARL_A_TOKENS_0_OF}"}],
        "cookie": True,
        "token": 5,
        "password": "${MEGARL_A_PASSWORD}",
    }


def test_a_resumed_run_says_what_must_be_in_the_environment(tmp_path: Path) -> None:
    config = parse_config(TREE | {"run": {"name": "r", "folder": str(tmp_path)}})
    checkpoints = CheckpointFolder(tmp_path / "r" / "checkpoints")
    folder = checkpoints.begin(4)
    (folder / CONFIG).write_text(to_yaml(config))
    (folder / "policy").mkdir()
    (folder / "policy" / "common.pt").write_bytes(b"x")
    write_state(folder, {"step": 4, "evaluations": {}})
    [said] = differences_at_resume(checkpoints.commit(4, provenance(to_yaml(config), 4, 4)), config, 4)
    assert said.startswith("saved configs keep no secrets: a run that reads this one's takes from its environment ")
    assert "rollout.engine_args.api_key from MEGARL_ROLLOUT_ENGINE_ARGS_API_KEY" in said
    assert KEY not in said


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_configs_and_logs_are_their_owners_alone(tmp_path: Path) -> None:
    save_resolved(parse_config(TREE), tmp_path / "config.yaml")
    log = f"from megarl.system.process_exit import log_to_file; log_to_file({str(tmp_path / 'rank.log')!r})"
    subprocess.run([sys.executable, "-c", log], check=True)
    server = ServerProcess(["--api-key", KEY, "--no-such-option"], dict(os.environ), tmp_path / "engine-0.log", "t")
    server.kill()
    saving = Saving(CheckpointFolder(tmp_path / "checkpoints"), to_yaml(parse_config(TREE)), leads=True)
    roles = SimpleNamespace(groups={"policy": SimpleNamespace(any_rank=lambda flag: flag)}, save=lambda folder: None)
    saving.begin(cast(Any, roles), 1, {"step": 1}, {})
    [kept] = tmp_path.glob("checkpoints/*/config.yaml")
    for file in (tmp_path / "config.yaml", tmp_path / "rank.log", tmp_path / "engine-0.log", kept):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        assert KEY not in file.read_text(), file
    assert "--api-key (hidden) --no-such-option" in (tmp_path / "engine-0.log").read_text().splitlines()[0]


RAISES = """
def judge(samples):
    basic = "{'Authorization': 'Basic dXNlcjpodW50ZXIyMg=='}"
    raise ValueError(f"the judge said no to {basic}, token='hunter-22', https://j/x?sig=hunter-23")
"""
TOLD = ("dXNlcjpodW50ZXIyMg", "hunter-22", "hunter-23")


def test_an_exception_of_a_reward_is_told_without_the_secrets_in_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(RAISES)
    config = RewardConfig(name=f"{tmp_path / 'own.py'}:judge", on_error="zero", strict_steps=0, max_error_share=1.0)
    data = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))
    sample = Sample("s", "g", "r", [1], [], [], [], [], "stop", response_text="x", row={"question": "q", "answer": "a"})
    with pytest.raises(RewardError) as caught:
        build_rewards([config], data).score([sample])
    tolerant = build_rewards([config], data)
    tolerant.tolerate([config])
    assert tolerant.tolerance is not None
    tolerant.tolerance.begin_step(5)
    tolerant.score([sample])
    said: list[str] = []
    records = tolerant.tolerance.take_records(said.append)
    assert "ValueError" in records[0]["traceback"]
    marks = RunMarks(tmp_path, leads=True)
    marks.begin()
    marks.end(caught.value)
    for text in (str(caught.value), json.dumps(records), *said, (tmp_path / "end.json").read_text()):
        assert "the judge said no" in text
        assert [secret for secret in TOLD if secret in text] == []


def test_an_exception_that_nobody_expected_ends_a_command_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise ValueError(f"token='hunter-22' and {KEY}")

    assert reported(run) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "hunter-22" not in error
    assert KEY not in error


def test_why_an_attempt_failed_reaches_its_parent_without_secrets() -> None:
    read, write = os.pipe()
    StatusPipe(write).failed(WorkerError(f"rank 0 failed: token='hunter-22' {KEY}"))
    told = os.read(read, 65536).decode()
    assert "rank 0 failed" in told
    assert "hunter-22" not in told
    assert KEY not in told


def test_samples_lose_keys_and_nothing_else(tmp_path: Path) -> None:
    plain = {"response_text": "token = 'x'; pwd = 5; see https://h/a?b=c", "training": {"pieces": ["to", "ken"], "reward": 1.0}}
    split = [KEY[start : start + 5] for start in range(0, len(KEY), 5)]
    secret = {"response_text": f"the tool said {KEY}", "response_ids": [1, 2], "training": {"pieces": ["said ", *split]}}
    file = SamplesFile(tmp_path / "samples.jsonl", 2, None, None)
    file.add(3, [plain, secret])
    first, second = (json.loads(line) for line in file.path.read_text().splitlines())
    assert first == {"step": 3, **plain}
    assert second["response_text"] == "the tool said (hidden)"
    assert second["response_ids"] == [1, 2]
    assert second["training"]["pieces"] == ["said (hidden)", *[""] * len(split)]


def test_progress_and_doctor_say_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=200)
    Progress(3, Phases(), console=console, shown={}).say(f"reward 'a' failed: token='hunter-22' {KEY}")
    console.print(render([Finding("proxy", f"https://me:hunter-22@proxy:80 and {KEY}", "problem", f"unset API_KEY={KEY}")]))
    printed = capsys.readouterr().out
    assert "proxy:80" in printed
    assert "reward 'a' failed" in printed
    assert "hunter-22" not in printed
    assert KEY not in printed


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "é" * 140])
def test_a_path_that_is_too_long_is_a_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "c.yaml").write_text(json.dumps(TREE | {"model": {"path": f"a\0{name}"}}))
    assert main(["config", str(tmp_path / "c.yaml")]) == 2
    assert "model.path has a null character" in capsys.readouterr().err


def test_configs_of_examples_and_files_of_runs_are_left_as_they_are() -> None:
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        tree = yaml.safe_load(path.read_text())
        assert without_secrets(tree) == tree, path
    page = (ROOT / "megarl/observe/page").rglob("*.*")
    for file in (*(file for file in page if file.suffix in (".js", ".css", ".html")), *(ROOT / "docs").rglob("*.jsonl")):
        text = file.read_text()
        assert redacted_data(text) == text, file


def test_trackers_are_told_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = parse_config(TREE | {"run": {"name": "r", "folder": str(tmp_path)}, "trackers": {"backends": ["wandb"]}})
    open_trackers(config).close()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"host/score" in path.read_bytes() for path in written)
    for path in written:
        assert KEY.encode() not in path.read_bytes(), path
        assert PASSWORD.encode() not in path.read_bytes(), path


def test_the_config_command_prints_no_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps(TREE))
    assert main(["config", str(tmp_path / "c.yaml")]) == 0
    printed = capsys.readouterr()
    assert "host/score" in printed.out
    assert KEY not in printed.out + printed.err
    assert PASSWORD not in printed.out + printed.err


@pytest.mark.parametrize("wrong", [f"rollout.engine_args={KEY}", f"run.steps=https://me:{PASSWORD}@host", f"api_key={KEY}"])
def test_a_sentence_about_a_mistake_quotes_no_secrets(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps(TREE))
    assert main(["config", str(tmp_path / "c.yaml"), wrong]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert KEY not in error
    assert PASSWORD not in error


def test_rewards_say_what_is_wrong_with_them_without_their_secrets() -> None:
    data = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))
    with pytest.raises(RewardError) as caught:
        build_rewards(parse_config(TREE | {"rewards": [{"name": "exact_number", "args": {"api_key": KEY}}]}).rewards, data)
    assert KEY not in str(caught.value)
    endpoint = Endpoint("http", f"https://me:{PASSWORD}@host/score", 1.0, 0, 0.0, {"Authorization": f"Bearer {KEY}"})
    for text in (str(endpoint.error("did not answer")), repr(endpoint.headers and endpoint)):
        assert KEY not in text
    assert PASSWORD not in str(endpoint.error("did not answer"))


def test_no_leaf_of_the_config_is_taken_for_a_secret() -> None:
    assert [leaf.name for leaf in config_fields() if is_secret(leaf.name.rpartition(".")[2])] == []
    assert without_secrets({"eos_token": "x", "api_key": None, "token_env": "E"}) == {
        "eos_token": "x", "api_key": None, "token_env": "E"
    }  # fmt: skip
