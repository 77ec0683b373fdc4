"""Checksums of many boxes as a few bytes: what ranks tell of what they sent, and a rank of an engine of what it holds.

Sums modulo 2^64, so that neither the order of boxes nor who adds which of them matters. Equal sums mean equal boxes; where they
differ, boxes are compared one by one (`checksums.compare`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from megarl.weights.checksums import UNCHECKED
from megarl.weights.rank_plan import SliceKey
from megarl.weights.sglang_targets import EVERY_RANK

Sums: TypeAlias = tuple[int, int, int]
"""How many boxes, and two sums over them of 64 bits that depend on a box's place and its checksum."""
Table: TypeAlias = npt.NDArray[np.uint64]
"""`[N, 6]`: an engine, a rank of it (0: every rank, 1: the first), the coverage of the boxes for it, and their `Sums`."""
WORD = 2**64


def coverage(boxes: Iterable[SliceKey]) -> int:
    """A sum that tells how many elements of each tensor each rank is sent, however the tensor is cut into boxes."""
    places = ((box, xxhash.xxh3_64_intdigest(f"{box.tensor}@{box.engine_rank}".encode())) for box in boxes)
    return sum(box.rows * box.cols * place for box, place in places) % WORD


def coverage_by_rank(boxes: Iterable[SliceKey]) -> dict[int, int]:
    """The coverage of the boxes of each rank, and of `EVERY_RANK`."""
    of_ranks: dict[int, list[SliceKey]] = {}
    for box in boxes:
        of_ranks.setdefault(box.engine_rank, []).append(box)
    return {rank: coverage(of_rank) for rank, of_rank in of_ranks.items()}


def combined(checksums: Iterable[tuple[SliceKey, str]]) -> Sums:
    """The sums of boxes, each bound to its place, so that two that are exchanged are seen; of those that have a checksum."""
    count = first = second = 0
    for (tensor, *place), checksum in checksums:
        if checksum != UNCHECKED:
            both = xxhash.xxh3_128_intdigest(f"{tensor} {place} {checksum}".encode())
            count, first, second = count + 1, first + both % WORD, second + both // WORD
    return count, first % WORD, second % WORD


@dataclass(frozen=True)
class SentDigests:
    """Sums of all that the ranks together sent to one engine, `[N, 5]`: the columns of a `Table` behind the engine."""

    rows: Table

    @property
    def coverage(self) -> dict[int, int]:
        """The coverage of the boxes of each of the engine's ranks, and of `EVERY_RANK`."""
        return {rank + EVERY_RANK: covered for rank, covered, *_ in self.rows.tolist()}

    @property
    def sums(self) -> dict[int, Sums]:
        """The sums of the boxes of each of the engine's ranks, where checksums were taken."""
        return {rank + EVERY_RANK: (count, *sums) for rank, _, count, *sums in self.rows.tolist() if count}


def sums_by_rank(checksums: Mapping[SliceKey, str], engine: int = 0) -> Table:
    """The table of what was sent to an engine, box by box."""
    boxes: dict[int, list[SliceKey]] = {}
    for box in checksums:
        boxes.setdefault(box.engine_rank, []).append(box)
    rows = [
        (engine, rank - EVERY_RANK, coverage(of_rank), *combined((box, checksums[box]) for box in of_rank))
        for rank, of_rank in boxes.items()
    ]
    return np.array(rows, np.uint64).reshape(-1, 6)


def by_engine(tables: Sequence[Table]) -> dict[int, SentDigests]:
    """The sum of what several ranks sent, by engine."""
    rows = np.concatenate([np.zeros((0, 6), np.uint64), *tables])
    if not len(rows):
        return {}
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    keys = rows[:, :2]
    starts = np.flatnonzero(np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)]))
    sums = np.add.reduceat(rows[:, 2:], starts, axis=0)
    engines, firsts = np.unique(keys[starts, 0], return_index=True)
    of_ranks = np.column_stack([keys[starts, 1], sums])
    return {engine: SentDigests(part) for engine, part in zip(engines.tolist(), np.split(of_ranks, firsts[1:]), strict=True)}
