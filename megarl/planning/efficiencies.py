"""What GPUs reach of their peaks, and what a step costs whatever its size: constants of the plan's seconds, by kind of GPU.

They are assumptions until a run has been measured; each field says where its value is from.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiencies:
    """Shares of peaks (between 0 and 1) and fixed seconds (names that end in `_s`)."""

    products: float = 0.4
    """Share of the peak in training: matrix products and what lies between them. An assumption."""
    links: float = 0.7
    """Share of the rates of NVLink and the network. An assumption."""
    decoding: float = 0.6
    """Share of a decoding step's roofline. An assumption."""
