"""The division of a batch among data-parallel ranks and micro-batches. Pure arithmetic on lengths.

A *unit* is a prompt with the responses to it, and what a rank computes of it at once is a *piece*. Each piece computes the
prompt once, and what several responses begin with; with `copied_prompts` the prompt once for each of its responses, but
pictures once. Invariants of a plan, whatever the input:

1. Every response of every unit is in exactly one piece; a micro-batch holds at most one piece of a unit.
2. Every rank has the same number of micro-batches, at least one, and none is empty.
3. A micro-batch above `max_tokens` holds a single response. The one exception: invariant 2 can ask for more micro-batches
   than there are responses (three responses that need one each, on two ranks). Only then, that is only if one more
   micro-batch on every rank would take more than all responses, the smallest micro-batches are joined.
4. No rank costs more than the mean rank plus the most expensive unit.
5. The same input gives the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from megarl.data.prefix_tree import NOTHING_SHARED, CommonPrefixes

UnitPart = tuple[int, tuple[int, ...]]
"""Unit index, and the places of its responses in ascending order."""
Assignment = list[list[list[UnitPart]]]
"""For each data-parallel rank its micro-batches, each a list of pieces."""

_IMBALANCE = 0.05
"""Units are split while the most expensive rank is this much above the mean and splitting helps."""


Grid = tuple[int, int, int]
"""Patches of a picture in time, height and width."""


class UnitSize(NamedTuple):
    """Lengths of a unit in tokens, grids of the prompt's pictures, and of each response's; empty where none has any.

    `common` is what its responses begin with alike.
    """

    prompt_tokens: int
    response_tokens: tuple[int, ...]
    grids: tuple[Grid, ...] = ()
    response_grids: tuple[tuple[Grid, ...], ...] = ()
    common: CommonPrefixes = NOTHING_SHARED

    def grids_of(self, places: Iterable[int]) -> tuple[Grid, ...]:
        """Grids of the prompt's pictures and of those in the responses at `places`."""
        if not self.response_grids:
            return self.grids
        return (*self.grids, *(grid for index in places for grid in self.response_grids[index]))


class CostModel(Protocol):
    """The cost of a piece, in any unit: `models/flops.FlopsModel` in operations."""

    def cost(
        self, prompt_tokens: int, response_tokens: Sequence[int], grids: Sequence[Grid], repeats: Sequence[int] = ()
    ) -> int:
        """A prompt computed once with responses that each attend to it and to themselves, and pictures of all of them.

        `repeats`: so many first tokens of some of the responses are computed with another's.
        """


def plan_micro_batches(
    units: Sequence[UnitSize],
    *,
    ranks: int,
    max_tokens: int,
    flops: CostModel,
    whole_units: bool = False,
    copied_prompts: bool = False,
) -> Assignment:
    """Share `units` among `ranks` in micro-batches of at most `max_tokens`, with the invariants at the top of this file.

    With `whole_units` each unit counts as one response: it is never split, and may stand alone above `max_tokens`.

    Raises:
        ValueError: there are fewer responses than ranks, or a unit has none.
    """
    if whole_units:
        joined = [
            UnitSize(
                unit.prompt_tokens,
                (sum(unit.response_tokens) - sum(unit.common.repeats(range(len(unit.response_tokens)))),),
                unit.grids_of(range(len(unit.response_tokens))),
            )
            for unit in units
        ]
        plan = plan_micro_batches(joined, ranks=ranks, max_tokens=max_tokens, flops=flops)
        return [[[(u, tuple(range(len(units[u].response_tokens)))) for u, _ in pieces] for pieces in share] for share in plan]
    responses = sum(len(unit.response_tokens) for unit in units)
    if any(not unit.response_tokens for unit in units):
        raise ValueError("a unit has no responses")
    if responses < ranks:
        raise ValueError(f"{responses} responses cannot be shared among {ranks} data-parallel ranks")
    planner = _Planner(units, max_tokens, flops, copied_prompts=copied_prompts)
    shares = planner.balance(planner.fitting_pieces(), ranks)
    bins = [planner.fill(share) for share in shares]
    target = min(max(len(share) for share in bins), responses // ranks)
    planner.reach_count(bins, target)
    return [[sorted(micro_batch) for micro_batch in share] for share in bins]


class _Planner:
    """The sizes of one planning problem, and the steps that solve it."""

    def __init__(self, units: Sequence[UnitSize], max_tokens: int, flops: CostModel, *, copied_prompts: bool) -> None:
        self.units, self.max_tokens, self.flops, self.copied_prompts = units, max_tokens, flops, copied_prompts
        self._costs: dict[UnitPart, int] = {}

    def cost(self, piece: UnitPart) -> int:
        if (known := self._costs.get(piece)) is None:
            unit, lengths = self.units[piece[0]], self._lengths(piece)
            copied = [lengths.pop() for _ in lengths[1:]] if self.copied_prompts else []
            known = self.flops.cost(unit.prompt_tokens, lengths, unit.grids_of(piece[1]), self._repeats(piece))
            known += sum(self.flops.cost(unit.prompt_tokens, [length], ()) for length in copied)
            self._costs[piece] = known
        return known

    def tokens(self, piece: UnitPart) -> int:
        prompts = len(piece[1]) if self.copied_prompts else 1
        return prompts * self.units[piece[0]].prompt_tokens + sum(self._lengths(piece)) - sum(self._repeats(piece))

    def _repeats(self, piece: UnitPart) -> tuple[int, ...]:
        return () if self.copied_prompts else self.units[piece[0]].common.repeats(piece[1])

    def _lengths(self, piece: UnitPart) -> list[int]:
        lengths = self.units[piece[0]].response_tokens
        return [lengths[index] for index in piece[1]]

    def total_cost(self, pieces: Iterable[UnitPart]) -> int:
        return sum(map(self.cost, pieces))

    def fitting_pieces(self) -> list[UnitPart]:
        """Whole units where they fit into a micro-batch, else as few parts of them as fit (first fit, longest first)."""
        pieces: list[UnitPart] = []
        for number, unit in enumerate(self.units):
            whole = number, tuple(range(len(unit.response_tokens)))
            groups: list[UnitPart] = []
            if len(whole[1]) == 1 or self.tokens(whole) <= self.max_tokens:
                groups.append(whole)
            else:
                for index in sorted(whole[1], key=lambda at: (-unit.response_tokens[at], at)):
                    self._put((number, (index,)), groups)
            pieces.extend(groups)
        return pieces

    def _put(self, piece: UnitPart, groups: list[UnitPart]) -> None:
        for at, group in enumerate(groups):
            joined = _join(group, piece)
            if self.tokens(joined) <= self.max_tokens:
                groups[at] = joined
                return
        groups.append(piece)

    def balance(self, pieces: list[UnitPart], ranks: int) -> list[list[UnitPart]]:
        """Share pieces among ranks, splitting those of the most expensive rank while that makes it cheaper."""
        while len(pieces) < ranks:
            pieces = self._split_one(pieces, pieces)
        shares = self._assign(pieces, ranks)
        while True:
            costs = [self.total_cost(share) for share in shares]
            highest = max(costs)
            heaviest = shares[costs.index(highest)]
            if highest * ranks <= (1 + _IMBALANCE) * sum(costs) or all(len(piece[1]) == 1 for piece in heaviest):
                return shares
            pieces = self._split_one([piece for share in shares for piece in share], heaviest)
            finer = self._assign(pieces, ranks)
            if max(map(self.total_cost, finer)) >= highest:
                return shares
            shares = finer

    def _split_one(self, pieces: list[UnitPart], among: Sequence[UnitPart]) -> list[UnitPart]:
        """`pieces` with the most expensive splittable one of `among` cut in two."""
        chosen = max((piece for piece in among if len(piece[1]) > 1), key=lambda piece: (self.cost(piece), piece))
        return [piece for piece in pieces if piece != chosen] + self._halves(chosen)

    def _halves(self, piece: UnitPart) -> list[UnitPart]:
        halves: list[list[int]] = [[], []]
        lengths = self.units[piece[0]].response_tokens
        sums = [0, 0]
        for index in sorted(piece[1], key=lambda at: (-lengths[at], at)):
            side = min((0, 1), key=lambda half: (sums[half], len(halves[half])))
            halves[side].append(index)
            sums[side] += lengths[index]
        return [(piece[0], tuple(sorted(half))) for half in halves]

    def _assign(self, pieces: Sequence[UnitPart], ranks: int) -> list[list[UnitPart]]:
        """Longest processing time first: the next most expensive piece goes to the cheapest rank."""
        heap = [(0, 0, rank) for rank in range(ranks)]
        shares: list[list[UnitPart]] = [[] for _ in range(ranks)]
        for piece in sorted(pieces, key=lambda piece: (-self.cost(piece), piece)):
            load, count, rank = heapq.heappop(heap)
            shares[rank].append(piece)
            heapq.heappush(heap, (load + self.cost(piece), count + 1, rank))
        return [self._rejoin(share) for share in shares]

    def _rejoin(self, share: list[UnitPart]) -> list[UnitPart]:
        """Parts of one unit that met on one rank become one piece again where that fits."""
        by_unit: dict[int, list[UnitPart]] = {}
        for piece in share:
            self._put(piece, by_unit.setdefault(piece[0], []))
        return [piece for pieces in by_unit.values() for piece in pieces]

    def fill(self, share: Sequence[UnitPart]) -> list[list[UnitPart]]:
        """Micro-batches of one rank: first fit, most tokens first."""
        bins: list[dict[int, UnitPart]] = []  # by unit
        filled: list[int] = []
        for piece in sorted(share, key=lambda piece: (-self.tokens(piece), piece)):
            unit, alone = piece[0], self.tokens(piece)
            for number, of_unit in enumerate(bins):
                # with another part of its unit it computes that part's prompt, and what both begin with
                same = of_unit.get(unit)
                joined = piece if same is None else _join(same, piece)
                tokens = filled[number] + (alone if same is None else self.tokens(joined) - self.tokens(same))
                if tokens <= self.max_tokens:
                    of_unit.pop(unit, None)  # a joined piece comes last
                    of_unit[unit], filled[number] = joined, tokens
                    break
            else:
                bins.append({unit: piece})
                filled.append(alone)
        return [[*of_unit.values()] for of_unit in bins]

    def reach_count(self, bins: list[list[list[UnitPart]]], target: int) -> None:
        """Give every rank exactly `target` micro-batches; `target * ranks` is at most the number of responses."""
        for share in bins:
            while len(share) > target:
                self._remove_one(share, bins, target)
        for share in bins:
            while len(share) < target:
                if not self._divide(share):
                    share.append([self._take_cheapest(bins)])

    def _remove_one(self, share: list[list[UnitPart]], bins: list[list[list[UnitPart]]], target: int) -> None:
        """Hand a micro-batch to a rank that has too few, else join the two that make the smallest."""
        share.sort(key=lambda micro_batch: sum(map(self.tokens, micro_batch)))
        needy = [other for other in bins if len(other) < target]
        if needy:
            min(needy, key=lambda other: sum(map(self.total_cost, other))).append(share.pop(0))
        else:
            first, second = share.pop(0), share.pop(0)
            for piece in second:
                first = _with(first, piece)
            share.append(first)

    def _divide(self, share: list[list[UnitPart]]) -> bool:
        """Cut the most expensive micro-batch that can be cut: between its pieces, else inside its only piece."""
        several = [micro_batch for micro_batch in share if len(micro_batch) > 1]
        wide = [micro_batch for micro_batch in share if len(micro_batch[0][1]) > 1]
        if not several and not wide:
            return False
        micro_batch = max(several or wide, key=lambda pieces: (self.total_cost(pieces), pieces))
        share.remove(micro_batch)
        if len(micro_batch) == 1:
            share.extend([piece] for piece in self._halves(micro_batch[0]))
        else:
            share.extend(self._assign(micro_batch, 2))
        return True

    def _take_cheapest(self, bins: list[list[list[UnitPart]]]) -> UnitPart:
        """Take the cheapest response out of a micro-batch that keeps at least one; the most expensive rank gives first."""
        for share in sorted(bins, key=lambda share: -sum(map(self.total_cost, share))):
            candidates = [
                (self.cost((piece[0], (index,))), piece, index, micro_batch)
                for micro_batch in share
                for piece in micro_batch
                for index in piece[1]
                if len(micro_batch) > 1 or len(piece[1]) > 1
            ]
            if candidates:
                _, piece, index, micro_batch = min(candidates, key=lambda candidate: candidate[:3])
                micro_batch.remove(piece)
                rest = tuple(other for other in piece[1] if other != index)
                if rest:
                    micro_batch.append((piece[0], rest))
                return piece[0], (index,)
        raise AssertionError("there are at least as many responses as micro-batches")


def _join(first: UnitPart, second: UnitPart) -> UnitPart:
    return first[0], tuple(sorted(first[1] + second[1]))


def _with(micro_batch: Sequence[UnitPart], piece: UnitPart) -> list[UnitPart]:
    """`micro_batch` and `piece`, as one piece where it already holds a part of the same unit."""
    same = [other for other in micro_batch if other[0] == piece[0]]
    return [other for other in micro_batch if other[0] != piece[0]] + [_join(same[0], piece) if same else piece]
