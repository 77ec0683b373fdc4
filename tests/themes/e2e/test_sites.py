"""Runs with an engine of another site, a process of its own that `megarl node join` started: it learns as without."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from megarl.config import Config
from megarl.trainers.rl.train import train
from tests.themes.e2e.test_async import results
from tests.themes.e2e.test_elastic_engines import COME_S, Script, add, of_cluster
from tests.themes.e2e.test_elastic_engines import cluster as cluster  # a fixture
from tests.themes.e2e.test_elastic_engines import ray_nodes as ray_nodes  # a fixture

pytestmark = [pytest.mark.needs_option("elastic_engines"), pytest.mark.slow]
pytest.importorskip("zstandard")
STEPS = 6


class Site:
    """A process of the other site, from here until it ends."""

    def __init__(self, folder: Path, *words: str, where: str | None = None) -> None:
        self.said_in = folder.parent / f"site-{time.monotonic_ns()}.txt"
        command = [sys.executable, "-m", "megarl", "node", "join", where or str(folder), "--name", "site-b", *words]
        with self.said_in.open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self.said_in.read_text()

    def ended(self, within_s: float = COME_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(within_s)
        finally:
            self.process.kill()

    def leave(self) -> None:
        """Have it leave as Ctrl-C does, and wait until it has."""
        self.process.send_signal(signal.SIGINT)
        assert self.ended() == 0, self.said


@pytest.fixture
def started() -> Iterator[list[Site]]:
    sites: list[Site] = []
    yield sites
    for site in sites:
        site.process.kill()


def settings(cluster: Cluster, steps: int, **changes: Any) -> dict[str, Any]:
    """A run in step with its samples, at one engine of its own and one of another site."""
    sync = {"rollout.schedule": {"mode": "sync"}, "algorithm.rollout_correction": {"mode": "none"}}
    here = {"rollout.engine": "embedded", "rollout.sites": {"port": 0}, "rollout.samples_per_prompt": 32}  # two requests a step
    return of_cluster(cluster, steps, 1, 2) | sync | here | {"run.name": "two-sites"} | changes


def learned(config: Config) -> tuple[list[float], list[tuple[Any, ...]]]:
    """What each step computed: gradients, and every response that was trained on with its numbers, bit for bit."""
    metrics, samples = results(config)
    rows = [(s["step"], s["sample_id"], s["response_ids"], s["rollout_log_probs"], s["weight_versions"]) for s in samples]
    return [row["policy/grad_norm"] for row in metrics], sorted(rows, key=lambda row: row[:2])


def test_an_engine_of_another_site_joins_works_and_leaves_in_a_run_that_learns_as_without(
    cluster: Cluster, tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, started: list[Site]
) -> None:
    add(cluster)
    config = tiny_config(**settings(cluster, STEPS))

    def come(script: Script) -> None:
        started.append(Site(script.folder))
        script.wait_for(2)

    def wait_for_weights(script: Script) -> None:
        """Have it be there when the requests of the step are given out."""
        ends_at, rollouts = time.monotonic() + COME_S, script.rollouts
        while rollouts.scheduler.engines[1].version != rollouts.version:
            assert time.monotonic() < ends_at, started[0].said
            time.sleep(0.05)

    acts = {"before_3": wait_for_weights, "before_4": wait_for_weights, "before_5": lambda script: started[0].leave()}
    script = Script(monkeypatch, config, before_2=come, **acts)
    train(config)
    said = started[0].said
    assert script.rollouts.scheduler.engines[1].sampled_tokens > 0
    assert "weights of version 1 whole" in said
    assert "weights of version 2 as differences from version 1" in said
    assert "left: it has handed over what it worked on" in said
    alone = tiny_config(**settings(cluster, STEPS) | {"run.name": "alone", "rollout.sites": None})
    train(alone)
    assert learned(config) == learned(alone)
