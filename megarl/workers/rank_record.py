"""The record of a rank's work since the driver last asked. Importing this module does not import megatron."""

from __future__ import annotations

from typing import NamedTuple

from megarl.observe.trace import Span


class RankRecord(NamedTuple):
    """The record of what a rank did since it was last asked, its peak memory in bytes, and the seconds of the policy's
    vision tower: of the
    forward passes in updates."""

    spans: list[Span]
    peak_bytes: int
    tower_s: float = 0.0
