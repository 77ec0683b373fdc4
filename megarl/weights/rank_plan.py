"""A plan's buckets as a training rank sends them: views of the rank's own shards, and where in an engine each belongs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megarl.models.weight_tensors import gathered
from megarl.weights.plan import ReshardPlan, TransferBucket
from megarl.weights.sglang_targets import EVERY_RANK
from megarl.weights.tensors import as_matrix


class SliceKey(NamedTuple):
    """Rows `row:+rows`, columns `col:+cols` of the `of_rows` rows that a rank of an engine holds of a tensor.

    A tensor of one axis has one column. `engine_rank` is `EVERY_RANK` of what all ranks are sent whole, to cut it themselves.
    """

    tensor: str
    engine_rank: int
    of_rows: int
    row: int
    col: int
    rows: int
    cols: int

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> SliceKey:
        """All of a tensor, for every rank."""
        rows, cols = as_matrix(tensor.shape)
        return cls(name, EVERY_RANK, rows, 0, 0, rows, cols)

    def ranks(self, of: int) -> Sequence[int]:
        """The ranks among an engine's `of` that are sent it."""
        return range(of) if self.engine_rank == EVERY_RANK else (self.engine_rank,)

    def __str__(self) -> str:
        name = self.tensor if self.engine_rank == EVERY_RANK else f"{self.tensor}@{self.engine_rank}"
        if (self.row, self.col, self.rows) == (0, 0, self.of_rows):
            return name
        return f"{name}[{self.row}:{self.row + self.rows}, {self.col}:{self.col + self.cols}]"


class WeightSlice(NamedTuple):
    """Something to send: `[rows]` or `[rows, cols]`, a view of what the sender has."""

    held: SliceKey
    tensor: Tensor


@dataclass(frozen=True)
class SendBatch:
    """Pieces that are staged and sent at once, and the engines that take it. `relayed`: for another rank, which checks it."""

    pieces: Sequence[WeightSlice]
    engines: frozenset[int]
    relayed: bool = False


SentBox = tuple[SliceKey, str, int, int]
"""What is sent, the parameter it is cut from, and the row and column where it begins there."""


class RankPlan:
    """One training rank's part of a plan, laid out once for all updates.

    A load has buckets for the ranks of an engine that the rank sends to, in turn, so that they copy at the same time; it has at
    most `plan.load_bytes`. `single_batch`: all that goes to an engine is one load; for senders that stage nothing.
    `buckets`: those that are sent; None: all that the plan has the rank send.
    """

    def __init__(
        self, plan: ReshardPlan, rank: int, *, single_batch: bool = False, buckets: Iterable[TransferBucket] | None = None
    ) -> None:
        self._plan = plan
        slices = plan.all_slices
        self._keys = slices.tensor * (plan.target.ranks + 1) + slices.engine_rank - EVERY_RANK
        own = plan.sends(rank) if buckets is None else buckets
        if single_batch:
            self._loads = self._of_engines(list(own))
        else:
            self._loads = [(engines, list(self._boxes(of_batch))) for engines, of_batch in batches(own, plan.load_bytes)]

    @property
    def load_bytes(self) -> int:
        """Bytes that are staged at once, at most."""
        return self._plan.load_bytes

    @property
    def engines(self) -> set[int]:
        """The engines that this rank sends something to."""
        return {engine for engines, _ in self._loads for engine in engines}

    def senders(self, engine: int) -> list[int]:
        """All ranks that send to an engine, this one perhaps among them."""
        return self._plan.senders(engine)

    def loads(self, shards: Mapping[str, Tensor], engines: Collection[int]) -> Iterator[SendBatch]:
        """Batches to send to `engines`; `shards` are this rank's Megatron parameters, as the plan names them."""
        for of_load, boxes in self._loads:
            if to := of_load & frozenset(engines):
                yield SendBatch([_piece(shards, *box) for box in boxes], to)

    def pieces(self, buckets: Sequence[TransferBucket], shards: Mapping[str, Tensor]) -> list[WeightSlice]:
        """The pieces in buckets of this rank; `shards` as for `loads`."""
        return [_piece(shards, *box) for box in self._boxes(buckets)]

    def contents(self, buckets: Sequence[TransferBucket]) -> list[tuple[SliceKey, int]]:
        """The pieces in buckets of any rank, with the numbers of their tensors in the plan's table."""
        numbers = (number for b in buckets for number in self._plan.transfers.tensor[b.start : b.stop].tolist())
        return [(key, number) for (key, *_), number in zip(self._boxes(buckets), numbers, strict=True)]

    def _of_engines(self, buckets: Sequence[TransferBucket]) -> list[tuple[frozenset[int], list[SentBox]]]:
        """By engine all that it is sent."""
        boxes = {bucket.number: list(self._boxes([bucket])) for bucket in buckets}
        of_engines: dict[int, list[SentBox]] = {}
        for bucket in buckets:
            for engine in bucket.engines:
                of_engines.setdefault(engine, []).extend(boxes[bucket.number])
        return [(frozenset([engine]), of_engine) for engine, of_engine in sorted(of_engines.items())]

    def _boxes(self, buckets: Sequence[TransferBucket]) -> Iterator[SentBox]:
        """The part of buckets that is sent."""
        plan = self._plan
        for bucket in buckets:
            numbers = plan.transfers.tensor[bucket.start : bucket.stop]
            at = np.searchsorted(self._keys, numbers * (plan.target.ranks + 1) + bucket.engine_rank - EVERY_RANK)
            for t, of_rows in zip(plan.contents(bucket), plan.all_slices.rows[at].tolist(), strict=True):
                key = SliceKey(t.tensor, t.engine_rank, of_rows, t.target_row, t.target_col, t.rows, t.cols)
                yield key, t.parameter, t.source_row, t.source_col


def batches(buckets: Iterable[TransferBucket], limit_bytes: float) -> Iterator[tuple[frozenset[int], list[TransferBucket]]]:
    """The buckets of one source for the same engines, in turn one for each rank of these, as many as `limit_bytes` hold."""
    for (_, engines), group in groupby(buckets, key=lambda bucket: (bucket.source, frozenset(bucket.engines))):
        of_ranks: dict[int, list[TransferBucket]] = {}
        for bucket in group:
            of_ranks.setdefault(bucket.engine_rank, []).append(bucket)
        in_turn = (bucket for row in zip_longest(*of_ranks.values()) for bucket in row if bucket is not None)
        for load in gathered(in_turn, limit_bytes, lambda bucket: bucket.nbytes):
            yield engines, load


def _piece(shards: Mapping[str, Tensor], held: SliceKey, parameter: str, row: int, col: int) -> WeightSlice:
    shard = shards[parameter]
    rows = shard[row : row + held.rows]
    return WeightSlice(held, rows if shard.ndim == 1 else rows.flatten(1)[:, col : col + held.cols])
