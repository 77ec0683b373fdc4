"""The machines of a run's ranks and engines, as training ranks are told of them. Pure values, without torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megarl.weights.placement import Placement, machine


@dataclass(frozen=True)
class Machines:
    """Machines by number, of each training rank and of each engine's ranks.

    `nearest` are the training ranks on the machines of these: the one on the same GPU, if there is one; -1: none is there.
    """

    ranks: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    nearest: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, placement: Placement, group: str = "policy") -> Machines:
        """The machines of a placement, seen from the ranks of `group`. Without GPUs all of an engine is where its first
        rank is."""
        numbers = {name: number for number, name in enumerate(sorted(placement.machines))}
        on = [numbers[machine(bundle.node)] for bundle in placement.bundles]
        of_ranks = tuple(on[bundle] for bundle in placement.ranks[group])
        at = {bundle: rank for rank, bundle in enumerate(placement.ranks[group])}
        beside: dict[int, list[int]] = defaultdict(list)
        for rank, number in enumerate(of_ranks):
            beside[number].append(rank)
        engines, nearest = [], []
        for engine in range(len(placement.engines)):
            bundles = placement.engines[engine]
            where = [on[bundle] for of_node in placement.engine_nodes(engine) for bundle in [of_node[0]] * len(of_node)]
            others = [beside.get(number, [-1]) for number in where]
            nearest_ranks = [
                at[bundle] if on[bundle] == number and bundle in at else ranks[position % len(ranks)]
                for position, (bundle, number, ranks) in enumerate(zip(bundles, where, others, strict=True))
            ]
            engines.append(tuple(where))
            nearest.append(tuple(nearest_ranks))
        return cls(of_ranks, tuple(engines), tuple(nearest))

    def beside(self, rank: int, engine: int, engine_rank: int) -> bool:
        """Return whether a training rank is on the machine of an engine's rank."""
        return self.ranks[rank] == self.engines[engine][engine_rank]
