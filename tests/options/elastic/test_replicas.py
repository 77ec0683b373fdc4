"""Which replicas the places that are there make."""

from __future__ import annotations

import random

import pytest

from megarl.config.layout import Layout
from megarl.options.elastic.replicas import Replicas, with_fewer

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
