"""A whole plan: what a config's run needs on a kind of GPU, whether that fits, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import AnyConfig
from megarl.errors import ConfigError
from megarl.models.shape import ModelShape
from megarl.planning.calibration import Calibration
from megarl.planning.gpus import GpuSpec
from megarl.planning.lengths import Lengths
from megarl.planning.memory import MemoryPlan, plan_memory, precision_of, tower_memory, workload
from megarl.planning.pictures import pictures_of
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
    def towers(self) -> dict[str, dict[str, float]]:
        """By role that sees the bytes of its vision tower, by part, on a rank of the first stage."""
        precision = precision_of(self.run, self.gpu)
        found = {
            role.name: tower_memory(role, precision, workload(self.run, role, precision, self.lengths))
            for role in self.run.roles
        }
        return {name: parts for name, parts in found.items() if parts}

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


def lengths_of(
    config: AnyConfig,
    prompt: float | None = None,
    response: float | None = None,
    *,
    pictures_per_prompt: int | None = None,
    picture_pixels: float | None = None,
) -> Lengths:
    """Mean lengths as given, else half of what the config allows; a prompt is as long as its pictures at least.

    Raises:
        ConfigError: pictures do not fit into prompts of this length, or the model takes none.
    """
    assumed = Lengths.assumed(*config.longest_parts)
    response = min(response or assumed.response, assumed.longest)
    pictures = pictures_of(config, pictures_per_prompt, picture_pixels, prompt)
    vision = ModelShape.read(config.model.path).vision
    tokens = pictures.patches / vision.merge**2 if vision is not None else 0.0
    is_given = pictures_per_prompt is not None or picture_pixels is not None
    if is_given and prompt is not None and prompt < tokens:
        raise ConfigError(
            f"--prompt-tokens is {prompt:,.0f}, but the pictures of a prompt alone have {tokens:,.0f}; it must be at least "
            "that, or --pictures-per-prompt or --picture-pixels smaller"
        )
    return Lengths(prompt or max(assumed.prompt, tokens), response, assumed.longest, pictures, config.sequences_per_step)


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
    memory = plan_memory(run, gpu, lengths)
    return CapacityPlan(run, gpu, available or run.gpus, lengths, calibration or Calibration(), memory)
