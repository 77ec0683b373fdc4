"""Seconds of a step by phase, and what bounds each: arithmetic, memory, links. Estimates, until a run has calibrated them.

Training: operations over peak times an efficiency, longer by the pipeline's bubble, plus what the ranks tell each other, none
of it at the same time. Generation: a roofline over the length distribution (`generation.py`). The weights' way to the engines:
the reshard plan. The names of phases are those of `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from megarl.config import Layout
from megarl.config.layout import divisors
from megarl.models.flops import FlopsModel
from megarl.models.shape import ModelShape
from megarl.planning.activations import Precision
from megarl.planning.calibration import Calibration
from megarl.planning.generation import generation_seconds
from megarl.planning.gpus import GPUS_PER_NODE, GpuSpec
from megarl.planning.lengths import Lengths
from megarl.planning.memory import MemoryPlan, precision_of
from megarl.planning.pictures import prompts_computed
from megarl.planning.roles import Engines, PlannedRole, RunShape
from megarl.reshard.cost import cost_of

LEAST_RANKS = 256
"""A weight update is priced for a part of the run that has so many ranks at least."""


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase in one step by what they are spent on; `bound` is what takes longest."""

    name: str
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.parts, key=lambda part: self.parts[part]) if self.seconds else "nothing"


@dataclass(frozen=True)
class TimePlan:
    """The phases of a step. `takes_turns`: one after the other; else generation runs beside the rest."""

    phases: tuple[PhaseTime, ...]
    takes_turns: bool
    tokens: float

    @property
    def step_seconds(self) -> float:
        """Of a whole step."""
        generation = sum(phase.seconds for phase in self.phases if phase.name == "generate")
        rest = sum(phase.seconds for phase in self.phases) - generation
        return generation + rest if self.takes_turns else max(generation, rest)

    def seconds(self, name: str) -> float:
        """Of one phase, 0 where there is none of this name."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)


def plan_times(
    run: RunShape, gpu: GpuSpec, memory: MemoryPlan, lengths: Lengths, calibration: Calibration, *, sync: bool = True
) -> TimePlan:
    """The phases of one step of a run, without the update of the engines unless `sync`."""
    config = run.config
    roles = {role.name: role for role in run.roles}
    sampling, sequences = config.sampling, float(config.sequences_per_step)
    passes = {name: _pass(run, role, gpu, lengths, sequences, calibration) for name, role in roles.items()}
    phases = []
    if run.engines is not None:
        if sync:
            phases.append(PhaseTime("sync", _sync(run, gpu, calibration)))
        phases.append(PhaseTime("generate", generation_seconds(run, gpu, memory, lengths, calibration)))
    if sampling is not None:
        of_functions = {"rewards": sequences * calibration.reward_s_per_sample}
        phases.append(PhaseTime("reward", _added(of_functions, passes.get("reward_model", {}))))
    # each teacher is counted for all rows: how many name it, only the data say
    teachers = (name for name in roles if name.startswith("teacher"))
    answering = [name for name in ("policy", "reference", *teachers, "critic") if name in roles]
    if not config.needs_old_log_probs:
        answering.remove("policy")
    if answering or sampling is not None:
        phases.append(PhaseTime("log_probs", _added(*(passes[name] for name in answering))))
    seen, updates = sequences * config.epochs, config.optimizer_steps_per_step
    trained = [roles[name] for name in ("critic", "policy") if name in roles]
    of_roles = [_update(run, role, gpu, lengths, seen, updates, calibration) for role in trained]
    # Roles on GPUs of their own update at the same time.
    longest = max(of_roles, key=lambda parts: sum(parts.values()))
    phases.append(PhaseTime("update", _added(*of_roles) if run.colocated else longest))
    if sampling is not None:
        phases.append(PhaseTime("other", {"driver": calibration.other_s}))
    takes_turns = sampling is None or sampling.schedule.mode == "sync"
    return TimePlan(_scaled(phases, calibration), takes_turns, sequences * (lengths.prompt + lengths.response))


def _scaled(phases: list[PhaseTime], calibration: Calibration) -> tuple[PhaseTime, ...]:
    return tuple(
        PhaseTime(phase.name, {part: seconds * calibration.scale(phase.name) for part, seconds in phase.parts.items()})
        for phase in phases
    )


def _added(*several: Mapping[str, float]) -> dict[str, float]:
    return {part: sum(one.get(part, 0.0) for one in several) for part in dict.fromkeys(p for one in several for p in one)}


def _pass(
    run: RunShape,
    role: PlannedRole,
    gpu: GpuSpec,
    lengths: Lengths,
    sequences: float,
    calibration: Calibration,
    *,
    decoder: float = 1.0,
    tower: float = 1.0,
    prediction: float = 0.0,
) -> dict[str, float]:
    """Seconds of a forward pass over `sequences`, with `decoder`, `tower` and `prediction` times the operations of these and of
    the layer for multi-token prediction, which is on the last stage.

    `tower` among them is what a tower adds to the pipeline's longest stage.
    """
    layout, shape = role.layout, role.shape
    precision = precision_of(run, gpu)
    flops = FlopsModel.of(shape)
    prompt, response = round(lengths.prompt), max(1, round(lengths.response))
    operations = decoder * sequences * flops.cost(prompt, [response])
    if role.value_head:
        operations -= decoder * sequences * response * flops.per_logit_row
    of_stages = [sum(map(len, chunks)) for chunks in layout.stage_layers(shape.layers)]
    peak = gpu.peak_flops(fp8=precision.fp8) / (1 if precision.itemsize == 2 or gpu.name == "cpu" else 2)
    of_a_layer = operations / layout.world_size / (peak * gpu.efficiencies.products) * layout.pp / shape.layers
    compute = of_a_layer * max(of_stages)
    if flops.prediction is not None and prediction:
        of_prediction = prediction * sequences * flops.prediction.cost(max(0, prompt - 1), [response])
        of_last = of_prediction / layout.world_size / (peak * gpu.efficiencies.products) * layout.pp
        compute = max(compute, of_a_layer * of_stages[-1] + of_last)
    tokens = sequences * (prompt + response) / layout.dp  # of a replica
    micro_batches = max(1.0, tokens / role.max_tokens)
    links = _links(role, gpu, precision.itemsize, tokens, max(of_stages), gpu.efficiencies.links)
    spent = {"arithmetic": compute, **{name: decoder * seconds for name, seconds in links.items()}}
    if lengths.pictures.most and shape.vision is not None:
        of_first = of_a_layer * of_stages[0] + tower * _tower_seconds(run, role, gpu, lengths, sequences, calibration)
        spent |= {"tower": max(0.0, of_first - compute)}
    bubble = (layout.pp - 1) / (micro_batches * (layout.vpp or 1))
    return spent | {"pipeline bubble": bubble * sum(spent.values())}


def _tower_seconds(
    run: RunShape, role: PlannedRole, gpu: GpuSpec, lengths: Lengths, sequences: float, calibration: Calibration
) -> float:
    """Seconds of a tower over the pictures of `sequences`, whole on each rank of the first stage of a replica."""
    precision, flops = precision_of(run, gpu), FlopsModel.of(role.shape)
    prompts = prompts_computed(
        run.config, sequences, role.max_tokens, lengths.prompt, lengths.response, of_reference=precision.is_reference
    )
    peak = gpu.peak_flops() / (1 if precision.itemsize == 2 or gpu.name == "cpu" else 2)
    return prompts / role.layout.dp * lengths.pictures.flops(flops) / (peak * gpu.efficiencies.products)


def _links(role: PlannedRole, gpu: GpuSpec, itemsize: int, tokens: float, layers: int, efficiency: float) -> dict[str, float]:
    """Seconds of a forward pass's messages of one rank, for `tokens` of its replica and `layers` of its stage."""
    layout, shape = role.layout, role.shape
    row = shape.hidden * itemsize
    local = tokens / layout.cp
    tensor = 4 * layers * local * row * (layout.tp - 1) / layout.tp
    width = (2 * shape.key_value if shape.latent is None else shape.heads * (shape.head_dim + shape.value_dim)) / layout.tp
    context = layers * tokens * width * itemsize * (layout.cp - 1) / layout.cp
    with_experts = layers * len(shape.expert_layers) / shape.layers
    rows = local / (layout.tp if layout.sequence_parallel else 1)
    experts = 2 * with_experts * rows * shape.top_k * layout.etp * row * (layout.ep - 1) / layout.ep
    pipeline = 2 * rows * row * (layout.vpp or 1) if layout.pp > 1 else 0.0
    # Ranks of a node share experts over NVLink; of the rest of the group all is beyond it.
    of_node = min(1.0, GPUS_PER_NODE / (layout.ep * layout.etp))
    seconds = {
        "tensor parallel": tensor / gpu.link_gb_per_s(layout.tp) / 1e9,
        "context parallel": context / gpu.link_gb_per_s(layout.tp * layout.cp) / 1e9,
        "expert parallel": experts * (of_node / gpu.nvlink_gb_per_s + (1 - of_node) / gpu.network_gb_per_s) / 1e9,
        "pipeline": pipeline / gpu.network_gb_per_s / 1e9,
    }
    return {name: spent / efficiency for name, spent in seconds.items() if spent}


def _update(
    run: RunShape,
    role: PlannedRole,
    gpu: GpuSpec,
    lengths: Lengths,
    sequences: float,
    updates: int,
    calibration: Calibration,
) -> dict[str, float]:
    """Forward and backward over `sequences` in `updates` optimizer steps."""
    precision = precision_of(run, gpu)
    of_step = float(run.config.sequences_per_step)
    # Of a part that is frozen, gradients of the weights are not computed; before the first one that is not, none are.
    decoder = 2.0 + _trained_share(role) + _computed_anew(role.shape, precision)
    tower = 1.0 if "vision" in role.freeze or role.shape.lora is not None else 3.0 + (precision.recompute == "full")
    if role.trained is not None and role.trained.experts.balance_coef:  # a pass that counts loads comes before
        decoder, tower = decoder + 1.0, tower + 1.0
    one_epoch = _pass(run, role, gpu, lengths, of_step, calibration, decoder=decoder, tower=tower, prediction=decoder)
    held = max(role.parameters, key=lambda stage: stage.trained)
    replicas, of_experts = role.layout.dp * role.layout.cp, role.layout.expert_shards
    state = role.state_bytes(precision.itemsize, precision.recipe)
    nbytes = (state.gradient + precision.itemsize) * (
        held.trained_dense * (replicas - 1) / replicas + held.trained_expert * (of_experts - 1) / of_experts
    )
    shard = held.trained_dense / replicas + held.trained_expert / of_experts
    offloaded = role.trained.optimizer.offload_fraction if role.trained is not None else 0.0
    return {name: sequences / of_step * seconds for name, seconds in one_epoch.items()} | {
        "data parallel": updates
        * nbytes
        / gpu.link_gb_per_s(role.layout.world_size // role.layout.pp)
        / 1e9
        / gpu.efficiencies.links,
        "optimizer": updates
        * shard
        * state.touched(precision.itemsize)
        * ((1 - offloaded) / gpu.hbm_gb_per_s + offloaded / gpu.host_gb_per_s)
        / 1e9,
    }


def _trained_share(role: PlannedRole) -> float:
    """Of the decoder's elements, those with a gradient."""
    whole = sum(stage.dense + stage.expert - stage.tower for stage in role.parameters)
    frozen = sum(stage.frozen_dense + stage.frozen_expert - stage.frozen_tower for stage in role.parameters)
    return 1 - frozen / whole


def _computed_anew(shape: ModelShape, precision: Precision) -> float:
    """What the backward pass computes anew, of a forward pass; attention and activations count as nothing."""
    if precision.recompute != "selective" or precision.is_reference:
        return 1.0 if precision.recompute == "full" else 0.0
    with_experts = len(shape.expert_layers)
    dense = 3 * shape.ffn * (shape.layers - with_experts)
    experts = 3 * (shape.expert_ffn * shape.top_k + shape.shared_ffn) * with_experts
    return dense / (dense + experts + 2 * (shape.query + shape.key_value) * shape.layers)


def _sync(run: RunShape, gpu: GpuSpec, calibration: Calibration) -> dict[str, float]:
    assert run.engines is not None
    engines = _repeated_part(run.engines)
    cost = cost_of(engines.plan, gpu.cluster, colocated=run.colocated)
    return {cost.bound.name: cost.seconds / gpu.efficiencies.links}


def _repeated_part(engines: Engines) -> Engines:
    """The smallest run of which this one is a multiple: replicas and engines that are so many times more send as much each."""
    layout, target = engines.trainer, engines.target
    per_stage = layout.tp * layout.cp * layout.dp
    times = max(
        times
        for times in divisors(math.gcd(layout.dp, target.engines))
        if times == 1 or (per_stage // times % (layout.ep * layout.etp) == 0 and layout.world_size // times >= LEAST_RANKS)
    )
    sizes = {field.name: getattr(layout, field.name) for field in fields(Layout)} | {"dp": layout.dp // times}
    return replace(engines, trainer=Layout(**sizes), target=replace(target, engines=target.engines // times))
