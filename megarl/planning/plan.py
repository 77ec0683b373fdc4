"""A whole plan: what a config's run needs on a kind of GPU, whether that fits, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import AnyConfig
from megarl.planning.calibration import Calibration
from megarl.planning.gpus import GpuSpec
from megarl.planning.lengths import Lengths
from megarl.planning.memory import MemoryPlan, plan_memory
from megarl.planning.roles import RunShape, run_shape
from megarl.planning.times import TimePlan, plan_times
from megarl.planning.turns import STATED


@dataclass(frozen=True)
class CapacityPlan:
    """Made by `make_plan`. `available`: GPUs that there are."""

    run: RunShape
    gpu: GpuSpec
    available: int
    lengths: Lengths
    calibration: Calibration
    memory: MemoryPlan

    @property
    def fits(self) -> bool:
        """Whether there are enough GPUs and each holds what is on it."""
        return self.memory.fits and self.run.gpus <= self.available

    @property
    def times(self) -> TimePlan:
        """Seconds by phase."""
        return plan_times(self.run, self.gpu, self.memory, self.lengths, self.calibration)

    @property
    def times_without_sync(self) -> float:
        """Seconds of a step but for the update of the engines, whose plan takes long to make."""
        return plan_times(self.run, self.gpu, self.memory, self.lengths, self.calibration, sync=False).step_seconds

    @property
    def excess(self) -> str:
        """What is over and by how much; only of a plan that does not fit."""
        if self.run.gpus > self.available:
            return f"the run takes {self.run.gpus:,} GPUs, but there are {self.available:,}"
        worst, gb, usable = self.memory.worst, 1e9, self.memory.usable
        (owner, part), size = max(worst.parts.items(), key=lambda item: item[1])
        return (
            f"GPU {worst.first} would hold {worst.total / gb:,.1f} GB{STATED[worst.fullest]}, "
            f"{(worst.total - usable) / gb:,.1f} GB more than the {usable / gb:,.1f} GB of {self.gpu.name} "
            f"that may be planned with; the largest part is the {part} of the {owner}, {size / gb:,.1f} GB"
        )


def lengths_of(config: AnyConfig, prompt: float | None = None, response: float | None = None) -> Lengths:
    """Mean lengths as given, else half of what the config allows."""
    assumed = Lengths.assumed(*config.longest_parts)
    response = min(response or assumed.response, assumed.longest)
    return Lengths(prompt or assumed.prompt, response, assumed.longest)


def make_plan(
    config: AnyConfig,
    gpu: GpuSpec,
    *,
    available: int | None = None,
    lengths: Lengths | None = None,
    calibration: Calibration | None = None,
) -> CapacityPlan:
    """The plan of a config's run on GPUs of one kind, of which there are `available` (None: as many as it takes).

    Raises:
        MegarlError: a model's config cannot be read, or a layout or the engines cannot hold it.
    """
    run, lengths = run_shape(config), lengths or lengths_of(config)
    memory = plan_memory(run, gpu, response_tokens=lengths.response)
    return CapacityPlan(run, gpu, available or run.gpus, lengths, calibration or Calibration(), memory)
