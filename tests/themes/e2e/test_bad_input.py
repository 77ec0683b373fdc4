"""What a user may get wrong in `megarl train`: one sentence that names it, exit code 2, nothing half-written or running."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import cli
from megarl.config import Config
from tests.themes.e2e.processes import servers

pytestmark = pytest.mark.usefixtures("local_ray")
Train = Callable[..., str]


@pytest.fixture
def train(
    tiny_config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Train:
    """`train("a.b=c", …)`: `megarl train` on the tiny run with overrides; returns its sentence."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its own Ctrl-C
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tiny_config(**{"data.eval": None}).model_dump(mode="json")))
    before = servers()

    def run(*overrides: str) -> str:
        assert cli.main(["train", str(file), *overrides]) == 2
        error = capsys.readouterr().err
        assert error.startswith("megarl: ")
        assert "Traceback" not in error
        assert servers() <= before
        return error

    return run


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Overrides' value: a JSONL file of `rows`."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def one_line(error: str) -> str:
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.path=nowhere"], "model.path is 'nowhere', which is no folder"),
        (["policy.layout.tp=3"], "policy.layout.tp is 3, which does not divide the model's 4 attention heads"),
        (["policy.layout.pp=3"], "policy.layout.pp is 3, which does not divide the model's"),
        (["policy.layout.ep=2", "policy.layout.dp=2"], "policy.layout.ep is 2"),
        (["rollout.tp=3"], "rollout.tp is 3"),
        (["data.max_prompt_tokens=3"], "data.max_prompt_tokens"),
        (["data.train.name=chain_sums"], "chain_sum"),
        (["data.prompt_key=quesiton"], "question"),
        (["rewards=[{name: exact_numbr}]"], "exact_number"),
        (["rewards=[{name: 'nowhere.py:reward'}]"], "nowhere.py"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_known_before_the_start_is_said_before_anything_is_written(
    train: Train, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    assert sentence in one_line(train(*overrides))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "rows.jsonl"),
        ([{"question": "1+1=", "answer": "2"}, {"qestion": "1+2=", "answer": "3"}], "'question'"),
        ([{"question": "1+1=", "answer": "2"}, {"question": 7, "answer": "3"}], "question"),
    ],
    ids=["no rows", "a row without the key", "a prompt that is no text"],
)
def test_bad_rows_are_named_before_anything_is_written(
    train: Train, tmp_path: Path, rows: list[dict[str, Any]], sentence: str
) -> None:
    source = f"data.train={{source: jsonl, path: {rows_file(tmp_path, rows)}}}"
    assert sentence in one_line(train(source))
    assert not (tmp_path / "runs").exists()


def test_an_unknown_architecture_is_named_with_those_that_are_known(train: Train, tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text()) | {"architectures": ["LamaForCausalLM"], "model_type": "lama"}
    (model / "config.json").write_text(json.dumps(config))
    error = one_line(train(f"model.path={model}"))
    assert "LamaForCausalLM" in error
    assert "LlamaForCausalLM" in error
    assert not (tmp_path / "runs").exists()


def test_a_world_larger_than_the_cluster_is_refused(train: Train) -> None:
    error = one_line(train("policy.layout.dp=64", "rollout.prompts_per_step=64", "resources.deadlines.start_s=2"))
    assert "64 places" in error


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return [float('nan')] * len(samples)", "nan"),
        # tests/rewards has their sentences, the run before how one ends
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("raise KeyError('gold')", "raised KeyError"),
                ("return [0.0]", "returned 1 rewards for 16 samples"),
                ("return None", "returned None"),
            )
        ),
    ],
)
def test_a_reward_that_fails_ends_the_run_without_a_checkpoint(train: Train, tmp_path: Path, body: str, sentence: str) -> None:
    tried = "if len(samples) == 2: return [0.0, 0.0]  # before the run, on made-up responses"
    (tmp_path / "mine.py").write_text(f"def reward(samples):\n    {tried}\n    {body}\n")
    assert sentence in one_line(train(f"rewards=[{{name: '{tmp_path}/mine.py:reward'}}]"))
    folder = tmp_path / "runs" / "run"
    assert not (folder / "checkpoints").exists()
    assert not (folder / "summary.json").exists()
    assert (folder / "metrics.jsonl").read_text() == ""


def test_a_reward_that_always_fails_is_told_before_anything_starts(train: Train, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(sample):\n    return sample.answer\n")
    error = one_line(train(f"rewards=[{{name: '{tmp_path}/mine.py:reward'}}]"))
    assert "'Sample' object has no attribute 'answer'" in error
    assert "asked before the run about made-up responses to row train-0" in error
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_is_named(train: Train) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"rollout.servers.port is {port}, which is in use" in one_line(
            train("rollout.engine=sglang", f"rollout.servers={{port: {port}}}")
        )


def test_a_server_that_does_not_start_is_reported_with_the_last_lines_of_its_log(train: Train, tmp_path: Path) -> None:
    error = train("rollout.engine=sglang", "rollout.engine_args={attention_backend: none_such}")
    assert "ended with exit code 2 before it answered" in error
    assert "engine-0.log" in error
    assert "none_such" in error
