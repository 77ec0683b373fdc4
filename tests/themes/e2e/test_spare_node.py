"""A run on a Ray cluster loses a node: it goes on where there is room, from its newest checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from ray.cluster_utils import Cluster

from megarl.config import Config
from megarl.observe import read_metrics
from tests.themes.e2e.processes import start_megarl, wait_for_step


def node_of_rank(cluster: Cluster) -> tuple[object, psutil.Process]:
    """A node that holds a training rank, and that rank's process."""
    for node in cluster.worker_nodes:
        for kind, processes in node.live_processes():
            if kind == "raylet":
                for child in psutil.Process(processes.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if "ray::RankProcess" in " ".join(child.cmdline()):
                            return node, child
    raise AssertionError("no node holds a rank")


@pytest.mark.exhaustive  # test_faults.py loses ranks, engines and Ray; this one all of a node at once
@pytest.mark.slow
def test_a_run_that_loses_a_node_goes_on_on_a_spare_one(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 10**8})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, object_store_memory=10**8)
        config = tiny_config(
            **{"run.steps": 8, "run.save_every": 2, "data.eval": None, "policy.layout.dp": 2, "rollout.threads": 1},
            **{"algorithm.kl.coef": 0.0, "resources.ray_address": cluster.address},
        )
        folder = Path(config.run_folder)
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
        run = start_megarl("train", str(tmp_path / "run.yaml"))
        try:
            wait_for_step(run, folder, 3, deadline_s=200)
            lost, rank = node_of_rank(cluster)
            cluster.remove_node(lost, allow_graceful=False)
            _, said = run.communicate(timeout=300)
        finally:
            if run.poll() is None:
                run.kill()
        assert run.returncode == 0, said
        assert not rank.is_running()
        faults = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
        assert faults[0]["recovered_s"] or len(faults) > 1
        assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(1, 9))
    finally:
        cluster.shutdown()
