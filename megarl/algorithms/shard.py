"""Some rows of a batch, and what their process must know of the others; sums that come out alike however rows are split.

A shard holds whole groups, and so whole episodes, in the batch's row order. Statistics of a group stay within it. Statistics
of the batch are made of one number per row (`Shard.rows`) or of counts (`Shard.total`), so no token travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 128
"""Most columns that are converted to float64 and added at a time."""


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Shard:
    """The way from b rows of a batch to all B. Each shard must call these functions equally often, in one order."""

    rows: Callable[[Tensor], Tensor] = _unchanged
    """`[b, ...]` of this shard's rows → `[B, ...]` of all rows in the batch's order."""
    own: Callable[[Tensor], Tensor] = _unchanged
    """`[B, ...]` of all rows → `[b, ...]` of this shard's."""
    total: Callable[[Tensor], Tensor] = _unchanged
    """int64 `[N]`: counts of this shard → their sum over all shards."""


WHOLE = Shard()
"""All rows are here."""


def row_sums(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of each row of `x` `[b, T]` over the places in `mask` bool `[b, T]` (None: all), float64 `[b]`.

    The same bits however many rows there are, and whatever the width that they are padded to with zeros.
    """

    def blocks() -> Iterable[Tensor]:
        for start in range(0, x.shape[1], LANES):
            block = x[:, start : start + LANES]
            yield (block if mask is None else torch.where(mask[:, start : start + LANES], block, 0)).double()

    return sum_of_blocks(blocks(), *x.shape)


def sum_of_blocks(blocks: Iterable[Tensor], rows: int, columns: int) -> Tensor:
    """Sum of each row over float64 blocks `[rows, at most LANES]` that make up `[rows, columns]`, float64 `[rows]`.

    Column c is added to lane c mod `LANES`, and lanes are added in halves: single additions in an order that depends on
    nothing, unlike that of a kernel for sums.
    """
    lanes = torch.zeros(rows, 1 << (min(columns, LANES) - 1).bit_length() if columns else 1, dtype=torch.float64)
    for block in blocks:
        lanes[:, : block.shape[1]] += block
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes.squeeze(1)


def in_order(x: Tensor) -> Tensor:
    """Sum of `x` `[B, ...]` over its rows, one after another: the same bits for every number of threads."""
    return torch.cat([x.new_zeros(1, *x.shape[1:]), x]).cumsum(0)[-1]


def batch_total(x: Tensor, shard: Shard) -> Tensor:
    """Sum of `x` `[b, ...]` over the rows of all shards, `[...]`."""
    return in_order(shard.rows(x))


def before_each_row(counts: Tensor, shard: Shard) -> Tensor:
    """Sum of the `counts` int64 `[b]` of the rows that stand before each row in the batch, int64 `[b]`."""
    of_all = shard.rows(counts)
    return shard.own(of_all.cumsum(0) - of_all)
