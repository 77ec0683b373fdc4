"""metrics.jsonl, trackers and summary.json hold exactly what was logged, also after a crash and a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import Config
from megarl.observe import (
    MetricsFile,
    Phases,
    build_summary,
    read_metrics,
    versions,
    write_summary,
)
from tests.config import smallest


def config(folder: Path, **trackers: Any) -> Config:
    return smallest.config(run={"folder": str(folder), "name": "r"}, trackers=trackers)


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
