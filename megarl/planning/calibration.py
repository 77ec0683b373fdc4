"""What a plan's seconds are scaled by: assumed, or fitted to the phases that a run has recorded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Shares of the peaks that a run reaches, and seconds that no peak says anything about.

    The default efficiencies are assumptions, not measurements: 0.4 of the peak in training, 0.6 of the bandwidth in
    generation, 0.7 of the links' rates in updates of weights.
    """

    source: str = "assumptions (train 0.4, generation 0.6, sync 0.7 of the peaks)"
    train_efficiency: float = 0.4
    generation_efficiency: float = 0.6
    sync_efficiency: float = 0.7
    reward_s_per_sample: float = 0.0
    other_s: float = 0.0
