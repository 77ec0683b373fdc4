"""The tower of a model that hears, as plans, checkpoints and counted operations know it. Without torch.

A sound is a row of patches, one for each token: the tower's convolutions make 13 positions of a chunk of 100 frames of 10 ms,
its layers attend among the positions of a window of chunks, and its projector makes a token's feature of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from megarl.models.vision import PROJECTOR, TOWER, Vision

CHUNK_FRAMES, CHUNK_TOKENS = 100, 13
"""Frames of a chunk, and the positions that three convolutions of stride two leave of it (Qwen3-Omni)."""
CONVOLUTIONS = ("conv2d1", "conv2d2", "conv2d3")


@dataclass(frozen=True, kw_only=True)
class Hearing(Vision):
    """The tower of a config that hears: sounds of `mel_bins` numbers per frame; `channels` are those of its convolutions."""

    mel_bins: int

    def tokens_of(self, frames: int) -> int:
        """Number of tokens of a sound of so many frames."""
        chunks, rest = divmod(frames, CHUNK_FRAMES)
        return chunks * CHUNK_TOKENS + -(-rest // 8)

    @cached_property
    def convolved(self) -> tuple[int, int, int]:
        """Numbers per channel that each convolution gives for a chunk."""
        sizes = [(self.mel_bins, CHUNK_FRAMES)]
        for _ in CONVOLUTIONS:
            sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
        first, second, third = map(prod, sizes[1:])
        return first, second, third

    @cached_property
    def products(self) -> tuple[int, int]:
        """Multiply-adds for each token: of convolutions and layers, and of the projector. A chunk that is cut short is padded,
        where another of the sound is whole, so it is counted as many tokens as it has."""
        convolutions = sum(
            prod(self.shapes[f"{name}.weight"]) * numbers for name, numbers in zip(CONVOLUTIONS, self.convolved, strict=True)
        )
        matrices = {name: prod(shape) for name, shape in self.shapes.items() if len(shape) == 2}
        of_projector = sum(size for name, size in matrices.items() if (TOWER + name).startswith(PROJECTOR))
        return convolutions // CHUNK_TOKENS + sum(matrices.values()) - of_projector, of_projector

    @property
    def patch_width(self) -> int:
        """Numbers of the frames of a token."""
        return self.mel_bins * CHUNK_FRAMES // CHUNK_TOKENS
