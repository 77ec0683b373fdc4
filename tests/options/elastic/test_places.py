"""Places of lost ranks and of spares, with names in the place of processes."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.errors import ClusterError
from megarl.options.elastic import places
from megarl.options.elastic.places import Places
from megarl.weights.placement import Bundle, Placement


class Reservations:
    """A Ray with so many free GPUs, which reserves what fits."""

    def __init__(self, free: int) -> None:
        self.free, self.asked, self.removed = free, list[int](), 0

    def placement_group(self, bundles: list[Any], strategy: str) -> Any:
        self.asked.append(len(bundles))
        return SimpleNamespace(wait=lambda timeout_seconds: len(bundles) <= self.free)

    def remove(self, _: Any) -> None:
        self.removed += 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make places with spares on node `b` for two ranks on node `a`; processes are called by the order of their starts."""

    def make(spares: int, free: int, gpus: bool = True, **named: bool) -> tuple[Places, Reservations, Any]:
        ray, numbers = Reservations(free), count(1)
        resources = {"GPU": float(free), "CPU": float(free)}
        of_ray = SimpleNamespace(
            cluster_resources=lambda: resources, available_resources=lambda: resources, kill=lambda *_, **__: None
        )
        monkeypatch.setattr(places, "ray", of_ray)
        monkeypatch.setattr(places, "placement_group", ray.placement_group)
        monkeypatch.setattr(places, "remove_placement_group", ray.remove)
        monkeypatch.setattr(places, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
        of_spares = [Bundle("b", number if gpus else None) for number in range(spares)]
        monkeypatch.setattr(places, "find_bundles", lambda group, **_: of_spares[: ray.asked[-1]])
        monkeypatch.setattr(Places, "_start", lambda *_: f"process {next(numbers)}")
        own = tuple(Bundle("a", number if gpus else None) for number in range(2))
        cluster: Any = SimpleNamespace(
            platform=SimpleNamespace(name="cuda" if gpus else "cpu"),
            placement=Placement(own, {"policy": (0, 1)}, ()),
            start_deadline_s=1.0,
            where=lambda number, threads: {},
        )
        group = SimpleNamespace(name="policy", actors=["rank 0", "rank 1"])
        return Places(cluster, spares, shared=False, **named), ray, group

    return make


def lose(of: tuple[Places, Reservations, Any], rank: int) -> Bundle:
    """Have a rank lose its process while its node answers; the place it has then."""
    made, _, group = of
    assert made.replace(group, {rank: True}, (), 0.0) == []
    placement = made._cluster.placement
    return placement.bundles[placement.ranks["policy"][rank]]


def test_a_gpu_that_loses_a_second_rank_is_not_used_again(opened: Any) -> None:
    of = opened(1, 1)
    assert [lose(of, 1) for _ in range(3)] == [Bundle("b", 0), Bundle("a", 1), Bundle("b", 0)]
    assert of[0].put_aside == [Bundle("a", 1)]
    assert of[0]._spares == [], "a process waits on the GPU that lost two ranks"


def test_places_without_gpus_are_never_put_aside(opened: Any) -> None:
    of = opened(1, 1, gpus=False)
    for _ in range(6):
        lose(of, 1)
    assert (of[0].put_aside, len(of[0]._spares)) == ([], 1)


def test_too_many_spares_are_refused_and_where_fewer_will_do_those_that_fit_are_reserved(opened: Any) -> None:
    with pytest.raises(ClusterError, match=r"resources.spares is 3, .* must be at most 2"):
        opened(3, 2)
    made, ray, _ = opened(3, 2, may_be_fewer=True)
    assert (ray.asked, ray.removed, len(made._spares)) == ([3, 2], 1, 2)
    made, ray, _ = opened(3, 0, may_be_fewer=True)
    assert (ray.asked, made._spares, made._reserved) == ([3], [], None)
