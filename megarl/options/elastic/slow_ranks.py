"""Ranks that are slower than their peers: which they are, by the seconds of own work that each says after a step. Pure.

Peers are ranks of a stage of the pipeline with the same experts: they run the same layers. How much work each gets differs from
step to step, so seconds are those of a token. Seconds in collectives do not count: who waits for a slow rank is not slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.config.layout import Layout

STEPS = 20
"""Steps that are looked at together."""
STEPS_BEHIND = 15
"""Steps of these in which a rank that is named was behind at all; one of equal ranks is so often by chance in 1 of 48 cases,
and by little."""
OfRanks = npt.NDArray[np.float64]
Process = tuple[str, int]
"""Address of a rank's node, and the process's number there: another process's steps are not the same rank's."""


@dataclass(frozen=True)
class Slowness:
    """A rank that was found slow, or is no longer: `behind` is the share by which a phase takes it longer than its peers."""

    rank: int
    process: Process
    phase: str
    behind: float
    peers: int
    is_slow: bool


def peers_of(layout: Layout) -> list[list[int]]:
    """The ranks that do the same work, of all sets that have two or more."""
    sets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        sets[at.pp, at.ep].append(rank)
    return [ranks for ranks in sets.values() if len(ranks) > 1]


def median_of_others(values: OfRanks) -> OfRanks:
    """For each of two or more values the median of all others."""
    order = np.argsort(values, kind="stable")
    places = np.empty(len(values), np.int64)
    places[order] = np.arange(len(values))
    ascending, count = values[order], len(values) - 1
    low, high = (count - 1) // 2, count // 2  # places among the others, of which those from the own one on are one further
    return (ascending[low + (places <= low)] + ascending[high + (places <= high)]) / 2


class RoleWatch:
    """Watches the ranks of a role. `threshold`: the share by which a slow one is behind the median of its peers."""

    def __init__(self, phases: Sequence[str], threshold: float) -> None:
        self.phases, self._threshold = phases, threshold
        self._layout: Layout | None = None
        self._peers: list[list[int]] = []
        self._processes: list[Process] = []
        self._behind = np.empty((len(phases), STEPS, 0))
        """`[phases, STEPS, ranks]`: by how much a rank was behind; no number where that is not known."""
        self.named: dict[tuple[int, str], Slowness] = {}

    def take(self, layout: Layout, processes: Sequence[Process], seconds: OfRanks) -> list[Slowness]:
        """Take a step's `seconds` `[ranks, phases]` of a token, 0 where a rank did nothing; returns what changed."""
        changed = [*self._forget_others(layout, processes)]
        for phase, of_phase in enumerate(self._behind):
            worked = [ranks for ranks in self._peers if (seconds[ranks, phase] > 0).all()]
            if not worked:  # as log-probs in a step whose update computes them
                continue
            of_phase[:-1] = of_phase[1:]
            of_phase[-1] = np.nan
            for ranks in worked:
                of_peers = seconds[ranks, phase]
                of_phase[-1, ranks] = of_peers / median_of_others(of_peers) - 1
        return [*changed, *self._judge()]

    def most_behind(self) -> float:
        """The share by which the slowest rank is behind, in whichever phase; 0 until that is known."""
        return max(0.0, float(np.nanmax(self._medians(), initial=0.0)))

    def _forget_others(self, layout: Layout, processes: Sequence[Process]) -> Iterator[Slowness]:
        if layout != self._layout:
            self._layout, self._peers = layout, peers_of(layout)
            self._behind = np.full((len(self.phases), STEPS, layout.world_size), np.nan)
            gone = {*range(len(self._processes))}
        else:
            gone = {rank for rank, process in enumerate(processes) if process != self._processes[rank]}
            self._behind[:, :, sorted(gone)] = np.nan
        self._processes = [*processes]
        for rank, phase in [named for named in self.named if named[0] in gone]:
            was = self.named.pop((rank, phase))
            yield Slowness(rank, was.process, phase, was.behind, was.peers, is_slow=False)

    def _medians(self) -> OfRanks:
        """By phase and rank the median of the last steps; no number before there are so many."""
        return np.median(self._behind, axis=1)

    def _judge(self) -> Iterator[Slowness]:
        medians, often = self._medians(), (self._behind > 0).sum(axis=1)
        of_rank = {rank: len(ranks) - 1 for ranks in self._peers for rank in ranks}
        for phase, rank in np.argwhere((medians > self._threshold) & (often >= STEPS_BEHIND)).tolist():
            name, behind = (rank, self.phases[phase]), float(medians[phase, rank])
            is_new = name not in self.named
            self.named[name] = Slowness(rank, self._processes[rank], name[1], behind, of_rank[rank], is_slow=True)
            if is_new:
                yield self.named[name]
        for rank, phase_name in [*self.named]:
            behind = float(medians[self.phases.index(phase_name), rank])
            if behind <= self._threshold / 2:
                was = self.named.pop((rank, phase_name))
                yield Slowness(rank, was.process, phase_name, behind, was.peers, is_slow=False)
