"""The order of a packed stream for Mamba-2 layers: which tokens follow which, and which see beyond their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.data.recurrence import Stage, recurrence_of
from megarl.data.stream import PackedStream


@dataclass
class ScanOrder:
    """The order of a stream's tokens; `stages` are run one after another.

    A convolution of width W sees the W places up to a token's own, but for the tokens at the places `begins` int64 `[R]`: they
    see those at the places `seen` int64 `[R, W]`, the oldest first, S where they would look before the beginning. `layout`
    int64 `[cp, S/cp]` is that of `StreamShard`.
    """

    stages: tuple[Stage, ...]
    begins: Tensor
    seen: Tensor
    layout: Tensor


def scan_order(stream: PackedStream, width: int, cp: int = 1) -> ScanOrder:
    """The order of `stream`'s tokens, which `cp` ranks share, for layers whose convolution is `width` wide; in main memory."""
    recurrence = recurrence_of(stream, width, cp)
    size = len(recurrence.taps)
    neighbours = torch.arange(size)[:, None] + torch.arange(1 - width, 1)[None]
    begins = (recurrence.taps != torch.where(neighbours < 0, size, neighbours)).any(1).nonzero().flatten()
    return ScanOrder(recurrence.stages, begins, recurrence.taps[begins], recurrence.layout)
