"""A run whose engine, rank and driver are hit one after the other ends with the weights of one that was left alone.

The reduced form of `benchmarks/faults.py`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train
from tests.themes.e2e.processes import outside_ray, start_megarl, wait_for_step
from tests.warm_workers import WarmWorkers

STEPS = 9
OVERRIDES = {
    "run.steps": STEPS,
    "run.save_every": 2,
    "run.export": True,
    "data.eval": None,
    "algorithm.kl.coef": 0.0,
    "policy.layout.dp": 2,
    "rollout.threads": 1,
    "resources.deadlines.step_s": 120,
}


def outcome(folder: Path) -> tuple[list[Any], bytes, list[float]]:
    """What was trained on in order, the weights at the end, and the steps in metrics.jsonl."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    samples = [(row["step"], row["group_id"], row["prompt_ids"], row["response_ids"]) for row in rows]
    return (
        samples,
        (folder / "model" / "model.safetensors").read_bytes(),
        [m["step"] for m in read_metrics(folder / "metrics.jsonl")],
    )


def called(name: str, processes: list[psutil.Process]) -> psutil.Process:
    """The first process that calls itself so."""
    for child in processes:
        with contextlib.suppress(psutil.Error):
            if name in " ".join(child.cmdline()):
                return child
    raise AssertionError(f"no process of the run is called {name}")


LOCAL_RAY = """
import sys, time
from megarl.config import parse_config
from megarl.supervise.restarts import run_with_restarts

def train(config):
    from megarl.workers.cluster import Cluster
    with Cluster([], engines=1, engine_tp=1, colocated=False, ray_address=None, log_folder=sys.argv[1], start_deadline_s=60):
        time.sleep(600)

tree = {"run": {"folder": sys.argv[1], "max_restarts": 1}, "model": {"path": "m"}, "rewards": [{"name": "exact_number"}]}
run_with_restarts(parse_config(tree | {"data": {"train": {"source": "jsonl", "path": "rows.jsonl"}}}), train)
"""


@pytest.mark.slow
def test_nothing_of_a_local_ray_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", LOCAL_RAY, str(tmp_path)], env=outside_ray())
    everything: dict[str, psutil.Process] = {}
    ends_at = time.monotonic() + 60
    try:
        while not {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} <= {name.partition(" ")[2] for name in everything}:
            assert run.poll() is None
            assert time.monotonic() < ends_at
            time.sleep(0.2)
            for process in psutil.Process(run.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    everything[f"{process.pid} {process.name()}"] = process
    finally:
        run.kill()
        run.wait(10)
    _, alive = psutil.wait_procs(list(everything.values()), timeout=20)
    assert alive == []


# test_async.py kills engines of a run, tests/supervise/test_restarts.py has what follows when a rank or driver is lost, and
# test_resume.py compares a run that goes on with one that was left alone
@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_is_hit_ends_as_one_that_was_left_alone(
    tiny_config: Callable[..., Config], local_ray: None, warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    config = tiny_config(**OVERRIDES, **{"run.name": "calm"})
    train(config)
    calm = outcome(Path(config.run_folder))

    hit = tiny_config(**OVERRIDES, **{"run.name": "hit", "run.max_restarts": 3})
    folder = Path(hit.run_folder)
    (tmp_path / "hit.yaml").write_text(yaml.safe_dump(hit.model_dump(mode="json", exclude_none=True)))
    strangers = warm_workers.forked
    run = start_megarl("train", str(tmp_path / "hit.yaml"), environment=warm_workers.environment)

    def below() -> list[psutil.Process]:
        forked = [process for process in warm_workers.forked if process not in strangers]
        return psutil.Process(run.pid).children(recursive=True) + forked

    try:
        wait_for_step(run, folder, 1)
        called("ray::EngineActor", below()).kill()
        wait_for_step(run, folder, 3)
        driver, rank = called("megarl train", below()), called("ray::RankProcess", below())
        driver.suspend()
        time.sleep(1)
        driver.resume()
        everything = below()
        rank.kill()
        _, said = run.communicate(timeout=240)
    finally:
        if run.poll() is None:
            run.kill()
    assert run.returncode == 0, said
    [fault] = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    assert fault["who"].startswith("rank ")
    assert f"(process {rank.pid} on " in fault["what"]
    assert "is gone" in fault["what"]
    assert fault["recovered_s"] > 0
    assert "restart 1 of 3" in said
    number = fault["who"].split()[1]
    stacks = {path.name: path.read_text() for path in (folder / "logs" / "stacks").glob("policy-*.txt")}
    assert set(stacks) == {"policy-0.txt", "policy-1.txt"}
    assert "is gone" in stacks[f"policy-{number}.txt"]
    assert "Current thread" in stacks[f"policy-{1 - int(number)}.txt"]
    samples, weights, steps = outcome(folder)
    assert steps == list(range(1, STEPS + 1))
    assert samples == calm[0]
    assert weights == calm[1]
    _, alive = psutil.wait_procs(everything, timeout=10)
    assert alive == []


def test_a_run_that_was_killed_before_its_summary_writes_it(tiny_config: Callable[..., Config], local_ray: None) -> None:
    config = tiny_config(**{"run.steps": 1, "run.name": "last", "run.export": True, "data.eval": None, "run.resume": "auto"})
    train(config)
    folder = Path(config.run_folder)
    (folder / "summary.json").unlink()
    before = outcome(folder)
    train(config)
    assert json.loads((folder / "summary.json").read_text())["run"] == "last"
    assert outcome(folder) == before
