"""A whole plan: what a config's run needs on a kind of GPU, whether that fits, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.config import AnyConfig
from megarl.config.engine_kinds import SGLANG, capabilities_of
from megarl.errors import ConfigError
from megarl.models.registry import architecture_for, load_hf_config
from megarl.models.shape import ModelShape
from megarl.option_list import functions
from megarl.planning.calibration import Calibration
from megarl.planning.gpu_memory import MemoryPlan
from megarl.planning.gpus import GpuSpec
from megarl.planning.lengths import Lengths
from megarl.planning.memory import plan_memory, precision_of, tower_memory, workload
from megarl.planning.prompt_pictures import pictures_of
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
        """Return whether there are enough GPUs and each holds what is on it."""
        return self.memory.fits and self.run.gpus <= self.available

    @property
    def towers(self) -> dict[str, dict[str, float]]:
        """By role that sees the bytes of its vision tower, by part, on a rank of the first stage."""
        precision = precision_of(self.run, self.gpu)
        towers = {
            role.name: tower_memory(role, precision, workload(self.run, role, precision, self.lengths))
            for role in self.run.roles
        }
        return {name: parts for name, parts in towers.items() if parts}

    @property
    def engine_refusal(self) -> str | None:
        """Why a run would refuse the engines that are planned: SGLang is not proven with the model. None: it would not."""
        config = self.run.config
        if config.sampling is None or capabilities_of(config.sampling) is not SGLANG:
            return None
        model = load_hf_config(config.model.path)
        return architecture_for(model).sglang.refusal(model)

    @property
    def node_refusal(self) -> str | None:
        """Why the main memory of a node would not hold what options keep there. None: it does, or nobody knows its size."""
        return next(filter(None, (refusal(self) for refusal in functions("times", "node_refusal"))), None)

    @property
    def times(self) -> TimePlan:
        """Seconds by phase."""
        times = plan_times(self.run, self.gpu, self.memory, self.lengths, self.calibration)
        for shortened in functions("times", "shortened"):
            times = shortened(self, times)
        return times

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
    longest: int | None = None,
    pictures_per_prompt: int | None = None,
    picture_pixels: float | None = None,
) -> Lengths:
    """Mean lengths as given, else half of what the config allows; a prompt is as long as its pictures at least.

    `longest`: tokens of the longest response, where it is known to be shorter than the config allows.

    Raises:
        ConfigError: pictures do not fit into prompts of this length, or the model takes none.
    """
    assumed = Lengths.assumed(*config.longest_parts)
    if config.sampling is None:  # prompt and response share one limit
        assumed = replace(assumed, longest=config.longest_sequence)
    longest = longest or assumed.longest
    response = min(response or assumed.response, longest)
    pictures = pictures_of(config, pictures_per_prompt, picture_pixels, prompt)
    vision = ModelShape.read(config.model.path).vision
    tokens = pictures.patches / vision.merge**2 if vision is not None else 0.0
    is_given = pictures_per_prompt is not None or picture_pixels is not None
    if is_given and prompt is not None and prompt < tokens:
        raise ConfigError(
            f"--prompt-tokens is {prompt:,.0f}, but the pictures of a prompt alone have {tokens:,.0f}; it must be at least "
            "that, or --pictures-per-prompt or --picture-pixels smaller"
        )
    mean_prompt = prompt or max(min(assumed.prompt, config.longest_sequence - response), tokens)
    return Lengths(mean_prompt, response, longest, pictures, config.sequences_per_step)


def check_lengths(config: AnyConfig, prompt: float | None, response: float | None, longest: int | None) -> None:
    """Refuse lengths that the config does not allow, as they are given to `megarl plan`.

    Raises:
        ConfigError: a mean or the longest response is above its limit.
    """
    if config.sampling is None:
        _check_given_rows(config, prompt, response, longest)
        return
    most_prompt, most_response = config.longest_parts
    for option, tokens, limit, most in (
        ("--prompt-tokens", prompt, "data.max_prompt_tokens", most_prompt),
        ("--longest-response", longest, "rollout.max_new_tokens", most_response),
        ("--response-tokens", response, "rollout.max_new_tokens", most_response),
        ("--response-tokens", response, "--longest-response", longest),
    ):
        if tokens is not None and most is not None and tokens > most:
            raise ConfigError(f"{option} is {tokens:,g}, but {limit} is {most:,}; it must be at most that")


def _check_given_rows(config: AnyConfig, prompt: float | None, response: float | None, longest: int | None) -> None:
    limit = f"data.max_tokens is {config.longest_sequence:,}"
    if longest is not None:
        raise ConfigError(f"--longest-response is for runs that sample responses, and in this one {limit}; leave it out")
    options = {"--prompt-tokens": prompt, "--response-tokens": response}
    names, tokens = [option for option, value in options.items() if value is not None], sum(filter(None, options.values()))
    if tokens > config.longest_sequence:
        what = f"{names[0]} is {tokens:,g}" if len(names) == 1 else f"{' and '.join(names)} are {tokens:,g} together"
        raise ConfigError(f"{what}, but {limit}; it must be at most that")


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
        MegarlError: a model's config cannot be read, or a layout or the engines cannot hold it, or the GPU has no FP8.
    """
    if config.model.fp8 != "none" and gpu.fp8_tflops is None:
        reason = f"{gpu.name} cannot compute: it has no FP8"
        raise ConfigError.of("model.fp8", config.model.fp8, reason, allowed="'none', or resources.gpu another GPU")
    run, lengths = run_shape(config), lengths or lengths_of(config)
    memory = plan_memory(run, gpu, lengths)
    return CapacityPlan(run, gpu, available or run.gpus, lengths, calibration or Calibration(), memory)
