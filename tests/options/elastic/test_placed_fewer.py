"""What a run that starts again places where there is no room for all of it; Ray's answers are a list here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.layout import Layout
from megarl.errors import ClusterError
from megarl.options.elastic.replicas import fitting
from megarl.weights.placement import Bundle
from megarl.workers import cluster as cluster_module
from megarl.workers.cluster import FEWER_S, Cluster, GroupRequest

LAYOUT = Layout(tp=2, dp=8)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Cluster, list[Any]]]:
    """A cluster of a colocated run of 16 GPUs that starts again, and what it asked of Ray."""

    def make(*offers: tuple[int, Sequence[int] | None]) -> tuple[Cluster, list[Any]]:
        """`offers`: free GPUs when a reservation has not been fulfilled or does not do, and the GPUs that it gets of each node,
        if any."""
        asked: list[Any] = []
        now, left = [0.0], list(offers)

        def reserve(bundles: Sequence[Any], strategy: str) -> Any:
            free, nodes = left.pop(0)
            asked.append(len(bundles))

            def wait(timeout_seconds: float) -> bool:
                now[0] += timeout_seconds if nodes is None else 0.0
                return nodes is not None

            ray.available_resources = lambda: {"CPU": 100.0, "GPU": float(free)}
            return SimpleNamespace(wait=wait, nodes=nodes)

        def found(group: Any, *, have_gpus: bool, deadline_s: float) -> list[Bundle]:
            return [Bundle(f"node-{node}", gpu) for node, gpus in enumerate(group.nodes) for gpu in range(gpus)]

        ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 100.0, "GPU": 16.0})
        monkeypatch.setattr(cluster_module, "ray", ray)
        monkeypatch.setattr(cluster_module, "placement_group", reserve)
        monkeypatch.setattr(cluster_module, "remove_placement_group", lambda group: asked.append("given back"))
        monkeypatch.setattr(cluster_module, "find_bundles", found)
        monkeypatch.setattr(cluster_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        cluster = Cluster(
            [GroupRequest("policy", LAYOUT, None)],
            engines=8,
            engine_tp=2,
            colocated=True,
            ray_address=None,
            log_folder=".",
            start_deadline_s=5 * FEWER_S,
            fewer=fitting,
        )
        return cluster, asked

    return make


def test_places_that_do_not_divide_over_nodes_are_given_back_for_fewer(opened: Any) -> None:
    cluster, asked = opened((15, None), (15, (7, 7)), (15, (6, 6)))
    cluster._place()
    assert asked == [16, "given back", 14, "given back", 12]
    assert (cluster.wanted.groups["policy"].dp, cluster.wanted.engines) == (6, 6)
    assert (cluster.asked.groups["policy"], cluster.asked.engines) == (LAYOUT, 8)
    assert len(cluster.placement.ranks["policy"]) == 12


def test_where_nothing_fits_all_of_it_is_waited_for(opened: Any) -> None:
    cluster, asked = opened((0, None), (1, None), (0, (8, 8)))
    cluster._place()
    assert asked == [16, "given back", 16, "given back", 16]
    assert cluster.wanted is cluster.asked


def test_after_its_time_a_start_is_refused_by_what_the_config_asks_for(opened: Any) -> None:
    cluster, asked = opened((14, None), (14, None), *[(0, None)] * 10)
    with pytest.raises(ClusterError, match="the layouts need 16 places"):
        cluster._place()
    assert asked[:5] == [16, "given back", 14, "given back", 12]
    assert asked[-1] == "given back"
