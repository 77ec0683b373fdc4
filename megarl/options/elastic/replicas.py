"""Places of the replicas of a run that has lost some: which replicas those that are there make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megarl.config.layout import Layout
from megarl.errors import LayoutError, counted
from megarl.weights.placement import ENGINES, PlacementRequest

Block = tuple[int, ...]
"""Numbers of places of one replica's ranks that have a machine together; they stay together, as tensor parallelism needs it."""


@dataclass
class Replicas:
    """The places of all ranks of a layout, by replica in blocks."""

    layout: Layout
    blocks: list[list[Block]]

    @classmethod
    def of(cls, layout: Layout, places: Sequence[int], machine_of: Callable[[int], str]) -> Replicas:
        """Divide the places of a layout's ranks, which are in rank order."""
        of_replica: list[list[int]] = [[] for _ in range(layout.dp)]
        for rank, place in enumerate(places):
            of_replica[layout.coords(rank).dp].append(place)
        return cls(layout, [[tuple(block) for _, block in groupby(replica, machine_of)] for replica in of_replica])

    @property
    def places(self) -> list[int]:
        """All places."""
        return [place for replica in self.blocks for block in replica for place in block]

    def put_together(self, there: Collection[int]) -> None:
        """Have as many replicas as may be stand on places that are `there`: a replica that lacks blocks is given those of
        others that lack some, too, and these get its own."""

        def lacking(replica: list[Block]) -> list[int]:
            return [number for number, block in enumerate(replica) if not all(place in there for place in block)]

        broken = sorted((replica for replica in self.blocks if lacking(replica)), key=lambda replica: len(lacking(replica)))
        for number, replica in enumerate(broken):
            swaps = []
            spare = [
                (other, spot)
                for other in reversed(broken[number + 1 :])
                for spot in range(len(other))
                if spot not in lacking(other)
            ]
            for spot in lacking(replica):
                swap = next((s for s in spare if len(s[0][s[1]]) == len(replica[spot])), None)
                if swap is None:
                    break
                spare.remove(swap)
                swaps.append((spot, *swap))
            else:
                for spot, other, its_spot in swaps:
                    replica[spot], other[its_spot] = other[its_spot], replica[spot]

    def largest(self, there: Collection[int]) -> tuple[Layout, list[int]] | None:
        """The layout with as many replicas as have all of their places `there`, or fewer where it cannot do with so many, and
        the places of its ranks; None: with none of them."""
        whole = [replica for replica in self.blocks if all(place in there for block in replica for place in block)]
        fits = with_fewer(self.layout, len(whole))
        if fits is None:
            return None
        of_replica = [iter([place for block in replica for place in block]) for replica in whole]
        return fits, [next(of_replica[fits.coords(rank).dp]) for rank in range(fits.world_size)]


def with_fewer(layout: Layout, most: int) -> Layout | None:
    """The layout with at most so many data-parallel replicas; None: it can do with none of these numbers."""
    return next((fits for dp in range(most, 0, -1) if (fits := _with_dp(layout, dp)) is not None), None)


def fitting(wanted: PlacementRequest, room: int) -> PlacementRequest | None:
    """Reduce replicas and engines, by about the same share, until they have room in so many places; None: not one of each has.

    What has the largest share of what was wanted, and takes places that something else could have, gives up a replica or an
    engine, one after the other.
    """
    fits = wanted
    while fits.bundles > room:
        sizes = {name: layout.world_size for name, layout in fits.groups.items()} | {ENGINES: fits.engines * fits.engine_tp}
        largest = max(sizes.values())
        shares = {
            name: (smaller, (fits.groups[name].dp / wanted.groups[name].dp if name else fits.engines / wanted.engines))
            for name, size in sizes.items()
            if (size == largest or not fits.colocated) and (smaller := _without_one(fits, name)) is not None
        }
        if not shares:
            return None
        fits = max(shares.values(), key=lambda one: one[1])[0]
    return fits


def _without_one(wanted: PlacementRequest, name: str) -> PlacementRequest | None:
    if name == ENGINES:
        return replace(wanted, engines=wanted.engines - 1) if wanted.engines > 1 and wanted.engine_tp else None
    fewer = with_fewer(wanted.groups[name], wanted.groups[name].dp - 1)
    return None if fewer is None else replace(wanted, groups={**wanted.groups, name: fewer})


def what_lacks(wanted: PlacementRequest, fits: PlacementRequest) -> str:
    """Describe what has no place, for people."""
    lacking = [
        f"{fits.groups[name].dp} of {counted(layout.dp, 'replica')} of {name}"
        for name, layout in wanted.groups.items()
        if fits.groups[name] != layout
    ]
    if fits.engines != wanted.engines:
        lacking.append(f"{fits.engines} of {counted(wanted.engines, 'engine')}")
    return " and ".join(lacking)


def _with_dp(layout: Layout, dp: int) -> Layout | None:
    try:
        return replace(layout, dp=dp)
    except LayoutError:
        return None
