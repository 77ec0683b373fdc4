"""Shards of a batch in threads: each computes with its own rows, and meets the others where it asks for theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from megarl.algorithms.shard import Shard

Answer = TypeVar("Answer")


def split_groups(groups: Tensor, parts: int, seed: int = 0) -> list[Tensor]:
    """The rows of each of `parts` shards, in the batch's order: whole groups, drawn; there may be empty shards."""
    numbers = groups.unique()
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, parts, (len(numbers),), generator=generator)[torch.searchsorted(numbers, groups)]
    return [(owner == part).nonzero().squeeze(1) for part in range(parts)]


class Meeting:
    """Where the shards of one batch exchange what is one number per row, or counts."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.row_numbers, self._order = rows, torch.cat([*rows]).argsort()
        self._brought: list[Tensor] = [torch.zeros(0)] * len(rows)
        self._barrier = threading.Barrier(len(rows))
        self.most_numbers = 0
        """The most that a shard gave of a row."""

    def shard(self, part: int) -> Shard:
        """The shard of this number."""

        def everyone(x: Tensor) -> list[Tensor]:
            self._brought[part] = x
            self._barrier.wait(20)
            brought = [*self._brought]
            self._barrier.wait(20)
            return brought

        def rows(x: Tensor) -> Tensor:
            assert len(x) == len(self.row_numbers[part])
            self.most_numbers = max(self.most_numbers, x[:1].numel())
            return torch.cat(everyone(x))[self._order]

        def total(x: Tensor) -> Tensor:
            assert x.dim() == 1
            assert not x.is_floating_point(), "only counts have a sum that does not depend on the split"
            return torch.stack(everyone(x)).sum(0)

        return Shard(rows, lambda x: x[self.row_numbers[part]], total)

    def run(self, one: Callable[[Tensor, Shard], Answer]) -> list[Answer]:
        """The answer of `one` for each shard, given its rows int64 `[b]` and the way to the others."""

        def guarded(part: int) -> Answer:
            try:
                return one(self.row_numbers[part], self.shard(part))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.row_numbers)) as threads:
            running = [threads.submit(guarded, part) for part in range(len(self.row_numbers))]
        failed = [done.exception() for done in running if done.exception() is not None]
        if failed:
            raise next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0])
        return [done.result() for done in running]


def narrowed(x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """`rows` of `x` `[B, T]`, no wider than the last place in `mask` of these rows needs: a shard pads to its own longest."""
    width = int((mask[rows].any(0).long() * torch.arange(1, mask.shape[1] + 1)).max()) if len(rows) and mask.shape[1] else 0
    return x[rows, :width]


def put_together(parts: Sequence[Tensor], rows: Sequence[Tensor], width: int) -> Tensor:
    """`[B, T]` of what shards have `[b, at most T]`, 0 beyond."""
    whole = parts[0].new_zeros(sum(map(len, rows)), width)
    for part, places in zip(parts, rows, strict=True):
        whole[places, : part.shape[1]] = part
    return whole
