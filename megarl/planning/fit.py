"""Fits a plan's seconds to a run: what its own plan says with the assumed efficiencies, against what its phases took."""

from __future__ import annotations

from pathlib import Path

from megarl.planning.calibration import SCALED, Calibration, Recorded, read_run
from megarl.planning.gpus import GpuSpec
from megarl.planning.plan import lengths_of, make_plan


def calibrated(folder: str | Path, gpu: GpuSpec) -> Calibration:
    """The calibration by a run that was made on GPUs of this kind.

    Raises:
        ConfigError: the run's config or metrics cannot be read.
    """
    return fit(read_run(folder), gpu)


def fit(recorded: Recorded, gpu: GpuSpec) -> Calibration:
    """Factors with which the plan of the recorded run takes as long as it did."""
    lengths = lengths_of(recorded.config, recorded.prompt_tokens, recorded.response_tokens)
    times = make_plan(recorded.config, gpu, lengths=lengths).times
    scales = {
        phase: recorded.phases[phase] / times.seconds(phase)
        for phase in SCALED
        if recorded.phases.get(phase) and times.seconds(phase)
    }
    rewards = max(0.0, recorded.phases.get("reward", 0.0) - times.seconds("reward"))
    others = sum(seconds for phase, seconds in recorded.phases.items() if phase not in (*SCALED, "reward"))
    stated = ", ".join(f"{phase} x {factor:.3g}" for phase, factor in scales.items())
    source = f"{recorded.steps} steps of {recorded.folder}, against the assumptions: {stated}"
    return Calibration(source, scales=scales, reward_s_per_sample=rewards / recorded.samples, other_s=others)
