"""Records of a step's work that ranks and the training side give the driver: spans, peaks of memory, counted operations."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

from megarl.observe.trace import Span


class RankRecord(NamedTuple):
    """The work of a rank since it was last asked, its peak memory in bytes, and the seconds of the forward passes of the
    policy's vision tower in updates."""

    spans: list[Span]
    peak_bytes: int
    tower_s: float = 0.0


@dataclass(frozen=True)
class UpdateFlops:
    """Floating-point operations of updates: of the decoder, and of the vision tower.

    `tokens` are those that the decoder computed, `apart` those that it would compute if sequences shared nothing.
    """

    decoder: int = 0
    tower: int = 0
    tokens: int = 0
    apart: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.decoder + self.tower

    def __add__(self, other: UpdateFlops) -> UpdateFlops:
        return UpdateFlops(*map(sum, zip(astuple(self), astuple(other), strict=True)))
