"""Ranks and engines on a real Ray of several nodes that say they have GPUs: which GPU each process gets, and what it sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from megarl.config import parse_config
from megarl.config.layout import Layout
from megarl.errors import ClusterError
from megarl.rollout.engines.protocol import EnginePlace
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from megarl.workers import cluster as cluster_module
from megarl.workers.cluster import Cluster, GroupRequest
from megarl.workers.own_gpu import gpu_number

PER_NODE = 4
VISIBLE = {0: None, 1: "4,5,6,7"}
"""`CUDA_VISIBLE_DEVICES` where each node's Ray was started."""


def reporter() -> type:
    """What stands for a rank and for an engine; a class inside a function, so that no other process imports this file."""

    class Reporter:
        def __init__(self, *arguments: Any, **_: Any) -> None:
            self.arguments = arguments

        def others(self) -> Any:
            """The names of the actors of an engine's further nodes."""
            return self.arguments[4]

        def report(self) -> dict[str, Any]:
            import os

            import ray

            from megarl.workers.own_gpu import own_gpu

            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            node = ray.get_runtime_context().get_node_id()
            return {"gpu": own_gpu(), "given": ray.get_gpu_ids(), "visible": visible, "node": node}

        def host_and_pid(self) -> tuple[str, int]:
            return "here", 1

        def address(self) -> tuple[str, int]:
            return "here", 1

        def call(self, *_: Any) -> int:
            return 1

        def stop(self) -> None:
            pass

    return Reporter


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    ray.shutdown()  # that of the session (`local_ray`), which has no GPUs
    before = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    started = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "object_store_memory": 10**8})
    try:
        for visible in VISIBLE.values():
            if visible is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
            started.add_node(num_cpus=PER_NODE, num_gpus=PER_NODE, object_store_memory=10**8)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        yield started.address
    finally:
        started.shutdown()
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def server_options(place: EnginePlace) -> dict[str, Any]:
    tree = {"model": {"path": "m"}, "data": {"train": {"source": "jsonl", "path": "x"}}, "rewards": [{"name": "exact_number"}]}
    return SglangEngine.options(parse_config(tree | {"rollout": {"tp": 2}}), place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("colocated", "dp", "engines"), [(True, 3, 3), pytest.param(False, 1, 2, marks=pytest.mark.exhaustive)]
)
def test_every_process_sees_its_nodes_gpus_and_has_its_own(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, colocated: bool, dp: int, engines: int
) -> None:
    remote: Any = ray.remote(reporter())
    monkeypatch.setattr(cluster_module, "RankActor", remote)
    monkeypatch.setattr(cluster_module, "EngineActor", remote)
    requests = [GroupRequest("policy", Layout(tp=2, dp=dp), None)]
    sizes = {"engines": engines, "engine_tp": 2, "colocated": colocated}
    with Cluster(requests, **sizes, ray_address=two_nodes, log_folder=str(tmp_path), start_deadline_s=60) as cluster:
        assert cluster.platform.name == "cuda"  # whatever this machine has
        at = cluster.placement
        actors = cluster.start_groups(0)["policy"].actors  # type: ignore[attr-defined]
        ranks = ray.get([actor.report.remote() for actor in actors])
        places = [EnginePlace(number, 1, "cuda", tmp_path, at.gpus(at.engines[number])) for number in range(engines)]
        options = [server_options(place) for place in places]
        servers = ray.get([actor.report.remote() for actor in cluster.start_engines("x", "m", options, 1)])
    for rank, said in enumerate(ranks):
        bundle = at.bundles[at.ranks["policy"][rank]]
        assert said["gpu"] == bundle.gpu
        assert bundle.node.endswith(said["node"][:8])
        assert ranks[rank // 2 * 2]["node"] == said["node"]  # a tensor-parallel pair
    assert len({(said["node"], said["gpu"]) for said in ranks}) == 2 * dp
    used = set()
    for number, said in enumerate(servers):
        line = ServerOptions("m", **options[number]).arguments(1, "id")
        environment = ServerOptions("m", **options[number]).environment({"CUDA_VISIBLE_DEVICES": str(said["visible"])})
        first, step = (int(line[line.index(flag) + 1]) for flag in ("--base-gpu-id", "--gpu-id-step"))
        assert said["visible"] in VISIBLE.values()  # Ray did not narrow it
        assert environment["CUDA_VISIBLE_DEVICES"] == str(said["visible"])
        assert (first, step) == (said["gpu"], 1)
        assert all(at.bundles[bundle].node.endswith(said["node"][:8]) for bundle in at.engines[number])
        used |= {(said["node"], first), (said["node"], first + step)}
    trained = {(said["node"], said["gpu"]) for said in ranks}
    assert len(used) == 2 * engines
    assert used == trained if colocated else not used & trained


@pytest.mark.slow
def test_an_engine_over_nodes_has_a_process_on_each_with_the_gpus_of_its_own_node(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remote: Any = ray.remote(reporter())
    for name in ("RankActor", "EngineActor", "EngineNodeActor"):
        monkeypatch.setattr(cluster_module, name, remote)
    requests = [GroupRequest("policy", Layout(tp=4, dp=2), None)]
    sizes = {"engines": 1, "engine_tp": 2 * PER_NODE, "colocated": True}
    with Cluster(requests, **sizes, ray_address=two_nodes, log_folder=str(tmp_path), start_deadline_s=60) as cluster:
        at = cluster.placement
        gpus, *others = [at.gpus(bundles) for bundles in at.engine_nodes(0)]
        place = EnginePlace(0, 1, "cuda", tmp_path, gpus, 0, tuple(others))
        [engine] = cluster.start_engines("x", "m", [server_options(place)], 1)
        nodes = [ray.get_actor(name) for name in ray.get(engine.others.remote())]
        first, second = ray.get([actor.report.remote() for actor in (engine, *nodes)])
    assert first["node"] != second["node"]
    assert [said["gpu"] for said in (first, second)] == [0, 0]
    assert {first["visible"], second["visible"]} == set(VISIBLE.values())
    assert gpus == others[0] == (0, 1, 2, 3)
    for bundles, said in zip(at.engine_nodes(0), (first, second), strict=True):
        assert all(at.bundles[bundle].node.endswith(said["node"][:8]) for bundle in bundles)


@pytest.mark.parametrize(("gpu", "visible", "number"), [(3, None, 3), ("6", "4,5,6,7", 2), ("GPU-b", "GPU-a, GPU-b", 1)])
def test_a_gpu_is_counted_among_those_that_are_visible(gpu: int | str, visible: str | None, number: int) -> None:
    assert gpu_number(gpu, visible) == number


def test_a_gpu_that_is_not_visible_is_a_sentence() -> None:
    with pytest.raises(ClusterError, match="Ray gave GPU 3, which is not among CUDA_VISIBLE_DEVICES='4,5'"):
        gpu_number(3, "4,5")
