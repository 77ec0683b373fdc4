"""metrics.jsonl, trackers and summary.json hold exactly what was logged, also after a crash and a resume."""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import Config, parse_config
from megarl.errors import ConfigError
from megarl.observe import (
    MetricsFile,
    Phases,
    build_summary,
    open_trackers,
    read_metrics,
    upload_commands,
    versions,
    write_summary,
)


def config(folder: Path, **trackers: Any) -> Config:
    return parse_config(
        {
            "run": {"folder": str(folder), "name": "r"},
            "model": {"path": "nowhere"},
            "data": {"train": {"name": "basic_arithmetic"}},
            "rewards": [{"name": "reasoning_gym"}],
            "trackers": trackers,
        }
    )


def test_each_line_is_on_disk_as_soon_as_it_is_logged(tmp_path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.log(1, {"policy/loss": 0.5, "reward/mean": torch.tensor(0.25), "kl/reference": np.float32(2.0)})
    expected = {"step": 1, "policy/loss": 0.5, "reward/mean": 0.25, "kl/reference": 2.0}
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [expected]


def test_numbers_json_has_no_word_for_survive(tmp_path) -> None:
    MetricsFile(tmp_path / "m.jsonl").log(1, {"a": float("nan"), "b": float("-inf")})
    json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (read,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(read["a"])
    assert read["b"] == -math.inf


def test_a_resumed_run_writes_no_step_twice_and_forgets_a_torn_line(tmp_path) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3, 4):
        file.log(step, {"x": step})
    file.close()
    path.write_text(path.read_text() + '{"step": 5, "x"')
    resumed = MetricsFile(path, resume_after_step=2)
    resumed.log(3, {"x": 30})
    assert read_metrics(path) == [{"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 3, "x": 30}]


def test_a_new_run_starts_an_empty_file(tmp_path) -> None:
    MetricsFile(tmp_path / "m.jsonl").log(1, {"x": 1})
    MetricsFile(tmp_path / "m.jsonl")
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_tensorboard_holds_the_logged_values(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(config(tmp_path, backends=["tensorboard"]))
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": step / 4})
    trackers.close()
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert len(read_metrics(tmp_path / "r" / "metrics.jsonl")) == 3


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


def test_the_summary_holds_what_a_reader_needs(tmp_path) -> None:
    phases = Phases()
    with phases.step(), phases("generate"):
        pass
    summary = build_summary(
        config(tmp_path),
        phases,
        eval_before={"accuracy": 0.1},
        eval_after={"accuracy": 0.3},
        gates={"log_prob_max_diff": torch.tensor(1e-6)},
    )
    write_summary(tmp_path / "summary.json", summary)
    read = json.loads((tmp_path / "summary.json").read_text())
    assert read["eval"] == {"before": {"accuracy": 0.1}, "after": {"accuracy": 0.3}}
    assert read["gates"]["log_prob_max_diff"] == pytest.approx(1e-6)
    assert set(read["phases"]) == {"generate", "other"}
    assert sum(phase["share"] for phase in read["phases"].values()) == pytest.approx(1)
    release = torch.__version__.split("+")[0]
    assert read["versions"]["torch"] in (torch.__version__, release)  # CUDA builds leave their build out of the package's
    assert read["machine"]["cores"] >= 1


def test_versions_say_none_for_what_is_missing() -> None:
    found = versions()
    assert found["numpy"] == np.__version__
    assert found["apex"] is None or isinstance(found["apex"], str)


def test_a_failed_write_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"a": 1})
    with pytest.raises(UnicodeEncodeError):
        write_summary(path, {"a": 2, "text": Unwritable()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


class Unwritable:
    """Its text cannot be encoded."""

    def __str__(self) -> str:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "on purpose")
