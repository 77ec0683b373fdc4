"""Which replicas the places that are there make."""

from __future__ import annotations

import random

import pytest

from megarl.config.layout import Layout
from megarl.options.elastic.replicas import Replicas, fitting, what_lacks, with_fewer
from megarl.weights.placement import PlacementRequest

LAYOUT = Layout(tp=2, pp=2, dp=3)
"""Ranks 0 to 11; a replica's are two of each stage, which share a machine."""


def replicas() -> Replicas:
    return Replicas.of(LAYOUT, range(12), lambda place: f"node {place // 2}")


def test_a_replica_has_its_ranks_and_a_block_is_what_shares_a_machine() -> None:
    assert replicas().blocks == [[(0, 1), (6, 7)], [(2, 3), (8, 9)], [(4, 5), (10, 11)]]
    assert sorted(replicas().places) == [*range(12)]


def test_all_places_make_the_layout_itself() -> None:
    layout, places = replicas().largest(range(12)) or (None, [])
    assert layout == LAYOUT
    assert places == [*range(12)]


def test_two_replicas_that_lack_a_machine_each_make_one() -> None:
    """Whichever stage the machines had been: a rank becomes whatever its place asks for."""
    some = replicas()
    there = {*range(12)} - {0, 1} - {2, 3}
    some.put_together(there)
    layout, places = some.largest(there) or (None, [])
    assert layout == Layout(tp=2, pp=2, dp=2)
    assert {*places} == there
    assert sorted(some.places) == [*range(12)]
    stages = [
        {places[rank] // 2 for rank in range(8) if (layout.coords(rank).dp, layout.coords(rank).pp) == at}
        for at in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert all(len(machines) == 1 for machines in stages), "tensor parallel ranks stay on a machine"


def test_a_machine_of_another_size_does_not_do() -> None:
    some = Replicas.of(Layout(tp=2, dp=2), range(4), lambda place: "ab"[place // 2] if place < 3 else "c")
    assert some.blocks == [[(0, 1)], [(2,), (3,)]]
    some.put_together({2, 3})
    assert some.largest({2, 3}) == (Layout(tp=2), [2, 3])
    some.put_together({0, 2})
    assert some.largest({0, 2}) is None


@pytest.mark.parametrize("seed", range(20))
def test_as_many_replicas_as_machines_are_there_for(seed: int) -> None:
    draw = random.Random(seed)
    layout = Layout(pp=4, dp=6)
    some = Replicas.of(layout, range(24), lambda place: str(place))
    for _ in range(5):
        there = {*draw.sample(range(24), draw.randint(4, 24))}
        some.put_together(there)
        fits, places = some.largest(there) or (None, [])
        assert fits == with_fewer(layout, len(there) // 4)
        assert {*places} <= there
        assert len({*places}) == len(places)
        assert sorted(some.places) == [*range(24)]


def test_a_layout_that_cannot_do_with_so_many_has_fewer() -> None:
    assert with_fewer(Layout(dp=4, ep=2), 3) == Layout(dp=2, ep=2)
    assert with_fewer(LAYOUT, 0) is None


def request(*, colocated: bool, engines: int = 4, engine_tp: int = 2, **groups: Layout) -> PlacementRequest:
    return PlacementRequest(groups, engines, engine_tp, colocated)


@pytest.mark.parametrize(
    ("wanted", "room", "dp", "engines", "lacking"),
    [
        (
            request(colocated=True, policy=LAYOUT, engines=3, engine_tp=4),
            11,
            2,
            2,
            "2 of 3 replicas of policy and 2 of 3 engines",
        ),
        (request(colocated=True, policy=LAYOUT, engines=1), 4, 1, 1, "1 of 3 replicas of policy"),
        (request(colocated=True, policy=LAYOUT, engines=3, engine_tp=4), 3, None, None, ""),
        (request(colocated=False, policy=LAYOUT), 18, 2, 4, "2 of 3 replicas of policy"),
        (request(colocated=False, policy=LAYOUT), 12, 2, 2, "2 of 3 replicas of policy and 2 of 4 engines"),
        (request(colocated=False, policy=LAYOUT), 6, 1, 1, "1 of 3 replicas of policy and 1 of 4 engines"),
        (request(colocated=False, policy=LAYOUT), 5, None, None, ""),
        (request(colocated=False, policy=LAYOUT, engines=4, engine_tp=0), 9, 2, 4, "2 of 3 replicas of policy"),
        (request(colocated=True, policy=Layout(dp=4, ep=2), engines=1), 3, 2, 1, "2 of 4 replicas of policy"),
        (request(colocated=True, policy=LAYOUT, engines=1), 12, 3, 1, ""),
    ],
)
def test_what_is_placed_where_there_is_room_for_less(
    wanted: PlacementRequest, room: int, dp: int | None, engines: int, lacking: str
) -> None:
    fits = fitting(wanted, room)
    if dp is None:
        assert fits is None
        return
    assert fits is not None
    assert (fits.groups["policy"].dp, fits.engines) == (dp, engines)
    assert fits.bundles <= room
    assert what_lacks(wanted, fits) == lacking


def test_groups_of_their_own_lose_about_the_same_share() -> None:
    wanted = request(colocated=False, policy=Layout(dp=8, tp=2), critic=Layout(dp=4), engines=8, engine_tp=1)
    fits = fitting(wanted, 14)
    assert fits is not None
    assert (fits.groups["policy"].dp, fits.groups["critic"].dp, fits.engines) == (4, 2, 4)
