"""What the report says of a run before anything else, of runs that end, go on, stop and are continued."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.report import page_data
from megarl.observe.run_record import read_run
from megarl.observe.run_status import FILES, QUIET_S, axes, run_status
from tests.observe.recorded import write_run

NOW = 1_800_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 12 steps whose files are all of `NOW`."""
    run = write_run(tmp_path / "run")
    for name in (*FILES, "summary.json"):
        os.utime(run / name, (NOW, NOW))
    return run


def state(folder: Path, later: float = 0.0) -> str:
    return str(run_status(read_run(folder), NOW + later)["state"])


def plan(folder: Path, steps: int) -> None:
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("seed: 0", f"seed: 0, steps: {steps}"))


@pytest.mark.parametrize(("steps", "expected"), [(12, "finished"), (13, "stopped")])
def test_a_run_with_a_summary_is_finished_if_it_made_its_steps(folder: Path, steps: int, expected: str) -> None:
    plan(folder, steps)
    assert state(folder) == expected


def test_a_run_without_a_summary_runs_until_it_is_quiet(folder: Path) -> None:
    (folder / "summary.json").unlink()
    assert state(folder, QUIET_S - 1) == "running"
    assert state(folder, QUIET_S + 1) == "stopped"
    rows = [json.loads(line) | {"time/step_s": 1000.0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(folder / "metrics.jsonl", (NOW, NOW))
    assert state(folder, 2999) == "running", "three of its steps"
    assert state(folder, 3001) == "stopped"


def test_a_run_that_is_continued_runs_though_it_has_a_summary(folder: Path) -> None:
    os.utime(folder / "metrics.jsonl", (NOW + 100, NOW + 100))
    assert state(folder, 101) == "running"


def test_its_facts_are_those_of_its_files(folder: Path) -> None:
    (folder / "placement.json").write_text(json.dumps({"nodes": ["a", "b"], "ranks": {}, "engines": []}))
    machine: dict[str, Any] = {"processor": "EPYC", "cores": 2, "memory_bytes": 24 << 30}
    told = {"machine": machine, "versions": {"megarl": "1.2"}}
    (folder / "summary.json").write_text(json.dumps({**told, "seconds_per_step": 1.5, "gates": {"kl": 0.0}}))
    facts = run_status(read_run(folder), time.time())
    assert facts["hardware"] == "2 nodes, EPYC, 2 cores, 24.0 GiB"
    assert (facts["done"], facts["step_seconds"], facts["faults"]) == (12, 1.5, 1)
    assert facts["checks"] == [{"name": "kl", "value": 0.0, "bound": None, "state": "measured"}]
    assert (facts["best"], facts["version"], facts["commit"]) == ((12, 0.6), "1.2", None)


@pytest.mark.parametrize(
    ("value", "bound", "told"),
    [(1e-9, 1e-4, "passed"), (1e-4, 1e-4, "passed"), (2e-4, 1e-4, "failed"), (float("nan"), 1e-4, "failed"),
     (None, 1e-4, "not measured"), (1.0, None, "measured")],
)  # fmt: skip
def test_a_check_has_passed_up_to_its_bound(folder: Path, value: float | None, bound: float | None, told: str) -> None:
    name = "kl_to_reference_at_first_step"
    bounds = {} if bound is None else {name: bound}
    (folder / "summary.json").write_text(json.dumps({"gates": {name: value}, "gate_bounds": bounds}))
    (check,) = run_status(read_run(folder), NOW)["checks"]
    assert (check["name"], check["state"]) == ("KL at the start", told)


def test_hardware_versions_and_commit_are_known_before_the_run_has_ended(folder: Path) -> None:
    (folder / "summary.json").unlink()
    machine = {"processor": "EPYC", "cores": 2, "memory_bytes": 24 << 30}
    told: dict[str, Any] = {"machine": machine, "versions": {"megarl": "1.2"}, "commit": "0123456789abcdef"}

    def facts(**more: Any) -> tuple[str, str, str]:
        (folder / "machine.json").write_text(json.dumps(told | more))
        found = run_status(read_run(folder), NOW)
        return found["hardware"], found["version"], found["commit"]

    assert facts() == ("EPYC, 2 cores, 24.0 GiB", "1.2", "0123456789ab")
    (folder / "placement.json").write_text(json.dumps({"nodes": ["a", "b"], "ranks": {}, "engines": []}))
    hardware, _, commit = facts(gpus=16, gpu="NVIDIA H100 80GB HBM3", commit="0123456789abcdef-dirty")
    assert hardware == "16 × NVIDIA H100 80GB HBM3, 2 nodes, EPYC, 2 cores, 24.0 GiB"
    assert commit == "0123456789ab-dirty"
    assert facts(gpus=0, gpu=None)[0] == "2 nodes, EPYC, 2 cores, 24.0 GiB"
    assert page_data([read_run(folder)])["runs"][0]["environment"] == {**machine, "megarl": "1.2"}


def test_a_run_that_was_told_to_stop_and_one_that_failed_say_so(folder: Path) -> None:
    for told in ({"state": "interrupted", "why": "stopped by SIGUSR1"}, {"state": "failed", "why": "no such thing"}):
        (folder / "end.json").write_text(json.dumps(told))
        assert state(folder) == told["state"]
        assert run_status(read_run(folder), NOW)["why"] == told["why"]
    (folder / "end.json").unlink()
    (folder / "summary.json").unlink()
    fault = {"who": "driver", "what": "killed", "recovered_s": None}
    for wait_s, expected in ((None, "failed"), (1.0, "running")):  # another attempt follows
        (folder / "faults.jsonl").write_text(json.dumps(fault | {"wait_s": wait_s}) + "\n")
        os.utime(folder / "faults.jsonl", (NOW + 1, NOW + 1))
        assert state(folder, 2) == expected
    (folder / "faults.jsonl").write_text(json.dumps(fault | {"wait_s": None}) + "\n")
    os.utime(folder / "faults.jsonl", (NOW - 1, NOW - 1))
    assert state(folder, 2) == "running", "it was continued"


def test_a_placement_that_no_run_wrote_is_named(folder: Path) -> None:
    (folder / "placement.json").write_text("[]")
    run = read_run(folder)
    assert (run.nodes, len(run.metrics)) == (1, 13)
    assert [*run.damage] == [f"{folder}/placement.json is damaged or not of a run, and left out (Input should be an object)"]


@pytest.mark.parametrize("file", ["metrics.jsonl", "samples.jsonl", "summary.json"])
def test_a_file_of_brackets_alone_is_named(folder: Path, file: str) -> None:
    """JSON nested 100,000 deep ended `megarl report` with a traceback."""
    (folder / file).write_text('{"step": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    [damage] = read_run(folder).damage
    assert damage.startswith(f"{folder}/{file}")
    assert "recursion limit" in damage


def test_tokens_and_hours_add_up_over_the_steps() -> None:
    rows = [{"step": 0}, {"step": 1, "speed/tokens_per_s": 10.0, "time/step_s": 3600.0}]
    rows += [{"step": 2, "speed/tokens_per_s": 20.0, "time/step_s": 1800.0}, {"step": 3, "time/step_s": float("nan")}]
    assert axes(rows) == {"tokens": [0.0, 36000.0, 72000.0, 72000.0], "hours": [0.0, 1.0, 1.5, 1.5]}
