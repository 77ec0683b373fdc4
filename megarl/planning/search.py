"""Which layouts would do: every one that the sizes allow is planned, those that fit are ranked by the time of a step.

All trained roles take the layout that is tried, the engines as many GPUs as there are; roles with layouts that the config gives
them for themselves (a reference, a reward model) take the tried one too where they share the GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import log2
from typing import Any

from megarl.config import AnyConfig, parse_any
from megarl.config.engine_kinds import capabilities_of
from megarl.config.layout import Layout, divisors
from megarl.errors import ConfigError, LayoutError
from megarl.models.check_layouts import check_models
from megarl.models.shape import ModelShape
from megarl.planning.calibration import Calibration
from megarl.planning.gpus import GPUS_PER_NODE, GpuSpec
from megarl.planning.lengths import Lengths
from megarl.planning.optimizer_bytes import state_bytes
from megarl.planning.parameters import stage_parameters
from megarl.planning.plan import CapacityPlan, make_plan
from megarl.planning.roles import role_shape
from megarl.reshard.run_plan import ITEMSIZE

LARGEST_CP = 8
MORE = (2, 4, 8)
"""Times as many GPUs, where nothing fits on those that there are."""
SIZES = ("tp", "pp", "cp", "ep", "etp", "dp")


@dataclass(frozen=True)
class Choice:
    """One thing to try: a layout for training, what is recomputed, and the ranks of an engine."""

    layout: Layout
    recompute: str
    engine_tp: int

    @property
    def stated(self) -> str:
        """As overrides of the config, shortened."""
        sizes = {name: getattr(self.layout, name) for name in SIZES}
        text = ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"
        ends = (self.layout.first_stage_layers, self.layout.last_stage_layers)
        text += f",first={ends[0]},last={ends[1]}" if any(ends) else ""
        return f"{text}, recompute {self.recompute}, engines of {self.engine_tp}"


@dataclass(frozen=True)
class Found:
    """What a search has found: plans that fit, fastest first, and why others were refused, with how many each time."""

    fitting: tuple[tuple[Choice, CapacityPlan], ...]
    refused: Mapping[str, int]

    @property
    def tried(self) -> int:
        """How many choices there were."""
        return len(self.fitting) + sum(self.refused.values())


def search(config: AnyConfig, gpu: GpuSpec, gpus: int, lengths: Lengths, calibration: Calibration) -> Found:
    """Try every choice on `gpus` GPUs."""
    fitting: list[tuple[float, int, Choice, CapacityPlan]] = []
    refused: dict[str, int] = defaultdict(int)
    for number, choice in enumerate(choices(config, gpus)):
        try:
            if _least_bytes(config, choice.layout) > gpu.usable_bytes:
                refused["a GPU is too small for the policy's parameters and gradients alone"] += 1
                continue
            tried = _with(config, choice, gpus)
            plan = make_plan(tried, gpu, available=gpus, lengths=lengths, calibration=calibration)
        except (ConfigError, LayoutError) as error:
            refused[error.kind] += 1
            continue
        if plan.fits:
            fitting.append((plan.times_without_sync, number, choice, plan))
        else:
            refused[_over(plan)] += 1
    fitting.sort(key=lambda entry: entry[:2])
    return Found(tuple((choice, plan) for _, _, choice, plan in fitting), dict(refused))


def what_fits(config: AnyConfig, found: Found, plan: CapacityPlan) -> str:
    """The rest of the sentence about a plan that does not fit: the nearest that does, on as many GPUs or on more."""
    for factor in (1, *MORE):
        if factor > 1:
            found = search(config, plan.gpu, plan.available * factor, plan.lengths, plan.calibration)
        if found.fitting:
            choice, _ = nearest_fitting(config, found)
            more = "" if factor == 1 else f" needs {plan.available * factor:,} GPUs"
            return f"the nearest that fits{more}: {choice.stated}"
    why = max(found.refused, key=lambda reason: found.refused[reason], default="nothing can be tried")
    return f"no layout that was tried fits on up to {plan.available * MORE[-1]:,} {plan.gpu.name}; most often: {why}"


def nearest_fitting(config: AnyConfig, found: Found) -> tuple[Choice, CapacityPlan]:
    """Of those that fit the one that changes least of what the config says."""
    own = config.policy.layout

    def distance(entry: tuple[Choice, CapacityPlan]) -> float:
        choice = entry[0]
        changes = sum(abs(log2(getattr(choice.layout, name) / getattr(own, name))) for name in SIZES)
        engine_tp = config.sampling.tp if config.sampling is not None else choice.engine_tp
        return changes + abs(log2(choice.engine_tp / engine_tp)) + (choice.recompute != config.model.recompute)

    return min(found.fitting, key=distance)


def choices(config: AnyConfig, gpus: int) -> Iterator[Choice]:
    """Everything that is worth trying: powers of two, tp within a node, stages as even as the layers allow."""
    shape = ModelShape.read(config.model.path)
    separate = config.resources.placement == "separate"
    training = (gpus - config.engine_places) // len(config.trained_roles) if separate else gpus
    engine_tps = _engine_tps(config, gpus, separate=separate)
    for tp, pp, cp in product(_powers(GPUS_PER_NODE), _powers(64), _powers(LARGEST_CP)):
        if training % (tp * pp * cp) or pp > shape.layers:
            continue
        dp = training // (tp * pp * cp)
        for ep, etp in _expert_sizes(shape, tp, tp * cp * dp):
            layout = _with_stages(shape, {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "dp": dp})
            for recompute, engine_tp in product(("none", "selective", "full"), engine_tps):
                yield Choice(layout, recompute, engine_tp)


def _engine_tps(config: AnyConfig, gpus: int, *, separate: bool) -> list[int]:
    sampling = config.sampling
    if sampling is None:
        return [1]
    if separate or capabilities_of(sampling).in_process or sampling.engine_args:
        return [sampling.tp]  # which engine_args go with
    return [tp for tp in _powers(2 * GPUS_PER_NODE) if gpus % tp == 0]


def _expert_sizes(shape: ModelShape, tp: int, per_stage: int) -> list[tuple[int, int]]:
    if not shape.experts:
        return [(1, 1)]
    fit = [ep for ep in divisors(shape.experts) if per_stage % ep == 0 and ep in _powers(64)]
    return [(ep, 1) for ep in fit if ep > 1] + [(1, tp)]


def _with_stages(shape: ModelShape, sizes: dict[str, int]) -> Layout:
    """The layout, with shorter first and last stages where equal ones cannot be."""
    whole: dict[str, Any] = {**sizes, "sequence_parallel": sizes["tp"] > 1}
    if shape.layers % sizes["pp"] == 0 or sizes["pp"] < 3:
        return Layout(**whole)
    of_each = -(-shape.layers // sizes["pp"])
    ends = shape.layers - of_each * (sizes["pp"] - 2)
    while ends < 2:
        of_each -= 1
        ends = shape.layers - of_each * (sizes["pp"] - 2)
    return Layout(**whole, first_stage_layers=ends // 2, last_stage_layers=ends - ends // 2)


def _least_bytes(config: AnyConfig, layout: Layout) -> float:
    """What the policy alone keeps on a GPU, whatever else is chosen: to refuse most of what is hopeless at once."""
    itemsize = ITEMSIZE[config.model.dtype]
    gradient = state_bytes(config.policy.megatron, itemsize).gradient
    shape = role_shape(config.roles[0])
    stages = stage_parameters(shape, layout, freeze=config.policy.freeze)
    return max((stage.dense + stage.expert) * itemsize + stage.trained * gradient for stage in stages)


def _with(config: AnyConfig, choice: Choice, gpus: int) -> AnyConfig:
    """`config` as it would be with a choice; checked as any config is."""
    tree = config.model_dump()
    layout = {name: value for name, value in vars(choice.layout).items() if value is not None}
    tree["model"]["recompute"] = choice.recompute
    for role in config.layouts:
        tree[role]["layout"] = layout
    sampling = config.sampling
    if config.resources.placement == "colocated" and sampling is not None and not capabilities_of(sampling).in_process:
        tree["rollout"] |= {"tp": choice.engine_tp, "engines": max(1, gpus // choice.engine_tp)}
    tried = parse_any(tree)
    check_models(tried)
    return tried


def _over(plan: CapacityPlan) -> str:
    if plan.run.gpus > plan.available:
        return "takes more GPUs than there are"
    owner, part = max(plan.memory.worst.parts, key=lambda key: plan.memory.worst.parts[key])
    return f"a GPU is too small: most is {part} of the {owner}"


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]
