"""The trackers that megarl has: what they hold is what was logged, without an account or a server."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.options.telemetry.trackers import open_trackers, upload_commands
from tests.config import smallest


def config(folder: Path, **trackers: Any) -> Config:
    return smallest.config(run={"folder": str(folder), "name": "r"}, trackers=trackers)


def test_tensorboard_holds_the_logged_values(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(config(tmp_path, backends=["tensorboard"]))
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": step / 4})
    trackers.close()
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_wandb_works_offline_without_an_account(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    told = {"tags": ["first", "grpo"], "group": "tries", "notes": "what it is for", "entity": "team"}
    settings = config(tmp_path, backends=["wandb"], project="mine", **told)
    trackers = open_trackers(settings)
    trackers.log(1, {"reward/mean": 0.5, "policy/loss": float("nan")})
    trackers.log(2, {"reward/mean": torch.tensor(0.75)})
    trackers.close()
    (file,) = (tmp_path / "r" / "wandb").glob("offline-run-*/*.wandb")
    run, history = read_wandb(file)
    assert (run.project, run.display_name) == ("mine", "r")
    assert ([*run.tags], run.run_group, run.notes, run.entity) == (["first", "grpo"], "tries", "what it is for", "team")
    assert upload_commands(settings) == [f"`wandb sync {file.parent}` uploads the wandb run"]
    assert upload_commands(config(tmp_path)) == []
    assert [{k: v for k, v in row.items() if k in ("_step", "reward/mean", "policy/loss")} for row in history] == [
        {"_step": 1, "reward/mean": 0.5},
        {"_step": 2, "reward/mean": 0.75},
    ]


def read_wandb(file: Path) -> tuple[Any, list[dict[str, Any]]]:
    """The run and the rows of a `.wandb` file: protobuf records in blocks of 32 KiB, each behind its CRC, length and type."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts, run, rows = file.read_bytes(), 7, b"", None, []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last of several parts
            record, parts = Record.FromString(parts), b""
            run = record.run if record.HasField("run") else run
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return run, rows


@pytest.mark.slow
def test_mlflow_writes_files_into_the_run_folder(tmp_path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    trackers = open_trackers(config(tmp_path, backends=["mlflow"], project="mine"))
    for step in (1, 2):
        trackers.log(step, {"reward/mean": step / 4, "policy/grad_norm": torch.tensor(2.0)})
    trackers.close()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "r" / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.metrics["policy/grad_norm"]) == ("r", "FINISHED", 2.0)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_a_sentence(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what import does with it: ImportError
    with pytest.raises(ConfigError, match=rf"trackers\.backends names {name}, but megarl\[{name}\] is not installed"):
        open_trackers(config(tmp_path, backends=[name]))
    assert not (tmp_path / "r").exists()
