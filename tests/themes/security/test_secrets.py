"""Secrets of a config are nowhere to be read: not in what is saved, tracked or printed, nor in what an error says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.config import config_fields, load_config, parse_config, save_resolved
from megarl.config.secrets import is_secret, redacted, without_secrets
from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.errors import ConfigError, RewardError
from megarl.options.telemetry.trackers import open_trackers
from megarl.rewards import build_rewards
from megarl.rewards.http_post import Endpoint

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
    stands_for_a_secret = r"data.train.args.password is '\(hidden\)', which stands for a secret: .* it must be given again"
    with pytest.raises(ConfigError, match=stands_for_a_secret):
        load_config(tmp_path / "config.yaml")


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


@pytest.mark.parametrize(
    "text",
    [
        "rollout.max_new_tokens=12345678",
        "'eos_token': '<|endoftext|>'",
        "me@example.com wrote",
        "runs/a@b/c",
        "unexpected token: 'weights'",
    ],
)
def test_what_is_no_secret_is_left_as_it_is(text: str) -> None:
    assert redacted(text) == text


def test_no_leaf_of_the_config_is_taken_for_a_secret() -> None:
    assert [leaf.name for leaf in config_fields() if is_secret(leaf.name.rpartition(".")[2])] == []
    assert without_secrets({"eos_token": "x", "api_key": None, "token_env": "E"}) == {
        "eos_token": "x", "api_key": None, "token_env": "E"
    }  # fmt: skip
