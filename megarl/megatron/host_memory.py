"""Main memory that what is on a GPU is copied to, one tensor after another, in few blocks.

For roles that leave the GPU (`offload.py`) and for checkpoints that are written while training goes on (`shards.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST_BLOCK, SMALLEST_BLOCK = 2**30, 2**20
"""Bytes of pinned memory. torch rounds every block up to a power of two (ATen/core/CachingHostAllocator.h), so all are such."""


class HostMemory:
    """Blocks of main memory that bytes are written to one after another, and read from in the same order.

    Pinned where they are for a GPU. torch keeps the blocks for the next time, and they have the same few sizes every time.
    Blocks end at multiples of every dtype's size.
    """

    def __init__(self, nbytes: int, device_type: str) -> None:
        sizes = block_sizes(nbytes)
        self.nbytes = sum(sizes)
        self._blocks = [allocate(size, device_type) for size in sizes]
        self.rewind()

    def rewind(self) -> None:
        """Begin at the first byte again."""
        self._block = self._start = 0

    def write(self, values: Tensor) -> None:
        """Append bytes."""
        for block, part in self._next(values):
            block.copy_(part)

    def read(self, values: Tensor) -> None:
        """Fill `values` with the bytes that were written in its place."""
        for block, part in self._next(values):
            part.copy_(block)

    def take(self, nbytes: int) -> list[Tensor]:
        """The next `nbytes`, a part of each block that they are in."""
        parts = []
        while nbytes:
            block = self._blocks[self._block]
            count = min(len(block) - self._start, nbytes)
            parts.append(block[self._start : self._start + count])
            nbytes, self._start = nbytes - count, self._start + count
            if self._start == len(block):
                self._block, self._start = self._block + 1, 0
        return parts

    def _next(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the blocks from the present place on, each with the part of `values` whose place it is."""
        parts = self.take(len(values))
        yield from zip(parts, values.split([len(part) for part in parts]), strict=True)


def block_sizes(nbytes: int) -> list[int]:
    """Powers of two with room for `nbytes`, and for less than `SMALLEST_BLOCK` more."""
    rest = -(-nbytes // SMALLEST_BLOCK) * SMALLEST_BLOCK
    sizes = [LARGEST_BLOCK] * (rest // LARGEST_BLOCK)
    rest %= LARGEST_BLOCK
    return sizes + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


def allocate(nbytes: int, device_type: str) -> Tensor:
    """A block of main memory, which a GPU can read and write by itself if it is for one."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device_type == "cuda")
