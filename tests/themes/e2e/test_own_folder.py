"""A run owns its folder, beside which no other runs, and its temporary files, of which none is left however it ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.runs.owner import this_process
from tests.themes.e2e.processes import start_megarl, wait_for_step
from tests.warm_workers import WarmWorkers

SLOW = "import time\n\n\ndef slow(samples):\n    time.sleep({seconds})\n    return [0.0] * len(samples)\n"


def wait_until_empty(folder: Path) -> None:
    ends_at = time.monotonic() + 30
    while left := list(folder.iterdir()):
        assert time.monotonic() < ends_at, left
        time.sleep(0.1)


def written(config: Config, file: Path) -> str:
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    return str(file)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_rival_is_refused_and_nothing_is_left_in_the_temporary_folder_by_a_run_that_is_killed_one_that_ends_and_an_evaluation(
    tiny_config: Callable[..., Config], warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    environment = {**warm_workers.environment, "TMPDIR": str(temporary), "WANDB_MODE": "offline"}
    overrides = {
        "run.steps": 1000,
        "run.name": "mine",
        "run.resume": "auto",
        "trackers.backends": ["wandb"],
        "run.save_every": 1,
    }
    config = tiny_config(**overrides)
    folder, file = Path(config.run_folder), written(config, tmp_path / "run.yaml")
    run = start_megarl("train", file, environment=environment)
    try:
        wait_for_step(run, folder, 1)
        rival = start_megarl("train", file, environment=environment)
        _, said = rival.communicate(timeout=60)
        assert rival.returncode == 2
        assert f"belongs to a run that is alive: process {run.pid} of" in said
        last = len(read_metrics(folder / "metrics.jsonl"))
        wait_for_step(run, folder, last + 1)
        assert list(temporary.iterdir()) != []
    finally:
        run.kill()
        run.communicate(timeout=60)
    wait_until_empty(temporary)
    steps = [int(row["step"]) for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    assert steps == list(range(1, steps[-1] + 1))
    run = start_megarl("train", file, f"run.steps={steps[-1] + 2}", environment=environment)
    _, said = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert list(temporary.iterdir()) == []
    assert not (folder / "owner.json").exists()
    evaluation = start_megarl("eval", file, environment=environment)
    _, said = evaluation.communicate(timeout=240)
    assert evaluation.returncode == 0, said
    assert list(temporary.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_was_held_up_while_another_took_its_folder_over_writes_nothing_more(
    tiny_config: Callable[..., Config], warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW.format(seconds=6))
    rewards = [{"name": f"{tmp_path / 'slow.py'}:slow"}]
    config = tiny_config(**{"run.steps": 1000, "run.name": "held", "data.eval": None, "rewards": rewards, "run.save_every": 1})
    folder = Path(config.run_folder)
    run = start_megarl("train", written(config, tmp_path / "run.yaml"), environment=warm_workers.environment)
    try:
        wait_for_step(run, folder, 1)
        time.sleep(3)  # its checkpoint is written, and the second step waits for its rewards
        processes = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        for process in processes:
            process.suspend()
        time.sleep(0.6)
        (tmp_path / "new").write_text(json.dumps(asdict(replace(this_process(), host="far", pid=77))))
        os.replace(tmp_path / "new", folder / "owner.json")
        before = contents(folder)
        for process in reversed(processes):
            process.resume()
        _, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 2
    assert f"{folder} was taken over by process 77 of" in said
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, Any]:
    """Everything in the folder but what processes log."""
    files = [path for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
