"""Trackers of the user's own, and SwanLab: they are given what metrics.jsonl is, and a failure of theirs ends no run."""

from __future__ import annotations

import csv
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.options.telemetry.trackers import open_trackers, upload_commands
from tests.config import smallest

ROOT = Path(__file__).parents[3]
EXAMPLE = f"{ROOT / 'examples' / 'monitoring' / 'csv_tracker.py'}:CsvTracker"
OWN = """
import json, signal, sys

class Keeper:
    def __init__(self, config, folder, resume_after_step, *, note="none"):
        signal.signal(signal.SIGINT, lambda *_: None)
        sys.excepthook = print
        self.file = (folder / "kept.jsonl").open("a")
        self.say(["opened", config["run"]["name"], config["rewards"][0]["args"]["api_key"], resume_after_step, note])

    def say(self, what):
        self.file.write(json.dumps(what) + "\\n")

    def log(self, step, metrics):
        self.say([step, metrics])

    def close(self):
        self.say(["closed"])
        self.file.close()

class Broken(Keeper):
    def log(self, step, metrics):
        if step != 3:
            raise RuntimeError(f"no step {step}")

    def close(self):
        raise OSError("no disk")

class Unopened(Keeper):
    def __init__(self, config, folder, resume_after_step):
        raise OSError("no server")

class Mute:
    def close(self):
        pass

def keeper(*_):
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def config(folder: Path, **trackers: Any) -> Config:
    rewards = [{"name": "reasoning_gym", "args": {"api_key": "sk-verysecretverysecret"}}]
    return smallest.config(run={"folder": str(folder), "name": "r"}, rewards=rewards, trackers=trackers)


def test_a_class_of_ones_own_is_given_every_step_as_plain_numbers(own: Path, tmp_path: Path) -> None:
    name = f"{own}:Keeper"
    trackers = open_trackers(config(tmp_path, backends=[name], args={name: {"note": "mine"}}), resume_after_step=4)
    trackers.log(5, {"reward/mean": torch.tensor(0.5), "policy/loss": float("inf"), "note": "text"})
    trackers.close()
    kept = (tmp_path / "r" / "kept.jsonl").read_text().splitlines()
    assert kept == [
        '["opened", "r", "${MEGARL_REWARDS_0_ARGS_API_KEY}", 4, "mine"]',
        '[5, {"reward/mean": 0.5, "policy/loss": Infinity}]',
        '["closed"]',
    ]


def test_a_tracker_cannot_take_over_ctrl_c(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    before = signal.getsignal(signal.SIGINT), sys.excepthook
    open_trackers(config(tmp_path, backends=[f"{own}:Keeper"])).close()
    assert (signal.getsignal(signal.SIGINT), sys.excepthook) == before


def test_a_tracker_that_fails_is_a_line_and_the_others_go_on(own: Path, tmp_path: Path) -> None:
    trackers = open_trackers(config(tmp_path, backends=[f"{own}:Broken", f"{own}:Keeper"]))
    said: list[str] = []
    trackers.say = said.append
    for step in range(1, 9):
        trackers.log(step, {"reward/mean": step / 8})
    trackers.close()
    assert (tmp_path / "r" / "kept.jsonl").read_text().count('"reward/mean"') == 8
    failed = [line.partition(": RuntimeError: ") for line in said]
    assert [before for before, *_ in failed] == [f"tracker {own}:Broken did not take step {step}" for step in (1, 2, 4, 5, 6)]
    assert failed[-1][2] == f"no step 6 ({own} line 24); it failed 3 times in a row, so it is told no more"


def test_a_tracker_that_cannot_be_closed_is_a_line(own: Path, tmp_path: Path) -> None:
    trackers = open_trackers(config(tmp_path, backends=[f"{own}:Broken"]))
    said: list[str] = []
    trackers.say = said.append
    trackers.close()
    assert said == [f"tracker {own}:Broken could not be closed: OSError: no disk ({own} line 27)"]


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        ("Kepper", {}, r"has no class 'Kepper' \(did you mean 'Keeper'\?\); it has Broken, Keeper, Mute, Unopened"),
        ("keeper", {}, r"has no class 'keeper'"),
        ("Mute", {}, r"'.*:Mute' has no log, which every tracker must have"),
        ("Keeper", {"nota": 1}, r"cannot be made of \(config, folder, resume_after_step\) and trackers.args: got an un"),
        ("Unopened", {}, r"'.*:Unopened' cannot be opened: OSError: no server \(.*own.py line 31\)"),
    ],
)
def test_a_class_that_is_no_tracker_is_a_sentence(
    name: str, args: dict[str, Any], sentence: str, own: Path, tmp_path: Path
) -> None:
    full = f"{own}:{name}"
    with pytest.raises(ConfigError, match=r"^trackers\.backends: .*" + sentence):
        open_trackers(config(tmp_path, backends=[full], args={full: args}))


def test_the_example_keeps_the_chosen_metrics_over_a_resume(tmp_path: Path) -> None:
    settings = config(tmp_path, backends=[EXAMPLE], args={EXAMPLE: {"metrics": ["reward/mean", "kl/reference"]}})
    trackers = open_trackers(settings)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": step / 4, "kl/reference": 0.125})
    trackers.close()
    trackers = open_trackers(settings, resume_after_step=2)
    trackers.log(3, {"reward/mean": 0.875})
    trackers.close()
    with (tmp_path / "r" / "chosen.csv").open(newline="") as file:
        assert [*csv.reader(file)] == [
            ["step", "reward/mean", "kl/reference"],
            ["1", "0.25", "0.125"],
            ["2", "0.5", "0.125"],
            ["3", "0.875", ""],
        ]


def test_the_page_shows_the_example_as_it_is() -> None:
    code = (ROOT / "examples" / "monitoring" / "csv_tracker.py").read_text()
    assert code[code.index("class CsvTracker") :] in (ROOT / "docs" / "watching.md").read_text()


def test_swanlab_works_offline_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab", reason="needs swanlab, which asks for a protobuf below 7: make venv has a later one")
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    told = {"tags": ["first", "grpo"], "group": "tries", "notes": "what it is for"}
    settings = config(tmp_path, backends=["swanlab"], project="mine", **told)
    before = signal.getsignal(signal.SIGINT), sys.excepthook
    trackers = open_trackers(settings)
    assert (signal.getsignal(signal.SIGINT), sys.excepthook) == before
    trackers.log(1, {"reward/mean": 0.5, "policy/loss": float("nan")})
    trackers.log(2, {"reward/mean": torch.tensor(0.75)})
    trackers.close()
    (file,) = (tmp_path / "r" / "swanlab").glob("run-*/*.swanlab")
    start, scalars = read_swanlab(file)
    assert (start.project, start.name, start.group, start.description) == ("mine", "r", "tries", "what it is for")
    assert [*start.tags] == ["first", "grpo"]
    assert scalars == [(1, "reward/mean", 0.5), (2, "reward/mean", 0.75)]
    assert "verysecret" not in (file.parent / "files" / "config.yaml").read_text()
    assert upload_commands(settings) == [f"`swanlab sync {file.parent}` uploads the swanlab run"]


def read_swanlab(file: Path) -> tuple[Any, list[tuple[int, str, float]]]:
    """The record of the start of a run, and its scalars as (step, name, value), by SwanLab's own reader."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader, start, scalars = DataStoreReader(), None, []
    reader.open(file)
    while (data := reader.scan()) is not None:
        record = Record.FromString(data)
        start = record.start if record.HasField("start") else start
        if record.HasField("scalar"):
            scalars.append((record.scalar.step, record.scalar.key, record.scalar.value.number))
    return start, scalars


def test_swanlab_that_is_not_installed_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(ConfigError, match=r"trackers\.backends names swanlab, but megarl\[swanlab\] is not installed"):
        open_trackers(config(tmp_path, backends=["swanlab"]))
