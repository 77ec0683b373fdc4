"""Seconds of a step by phase, and what bounds each: arithmetic, memory, links. Estimates, until a run has calibrated them.

Training: operations over peak times an efficiency, longer by the pipeline's bubble, plus what the ranks tell each other, none
of it at the same time. Generation: a roofline over the length distribution (`generation.py`). The weights' way to the engines:
the reshard plan. The names of phases are those of `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from megarl.config import Layout
from megarl.config.layout import divisors
from megarl.models.shape import ModelShape
from megarl.planning.activations import Precision
from megarl.planning.calibration import Calibration
from megarl.planning.generation import generation_seconds
from megarl.planning.gpu_memory import MemoryPlan
from megarl.planning.gpus import GpuSpec
from megarl.planning.lengths import Lengths
from megarl.planning.memory import precision_of
from megarl.planning.passes import Times, pass_seconds
from megarl.planning.roles import Engines, PlannedRole, RunShape
from megarl.planning.turns import takes_turns
from megarl.weights.cost import WAITING, ClusterRates, Cost, cost_of, placement_of
from megarl.weights.placement import PlacementRequest

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
        """The part that takes longest."""
        return max(self.parts, key=lambda part: self.parts[part]) if self.seconds else "nothing"


@dataclass(frozen=True)
class TimePlan:
    """The phases of a step. `takes_turns`: one after the other; else generation runs beside the rest.

    `step_s`: seconds of a step that is shorter than its phases say; None: they say it.
    """

    phases: tuple[PhaseTime, ...]
    takes_turns: bool
    tokens: float
    step_s: float | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds of a whole step."""
        if self.step_s is not None:
            return self.step_s
        generation, rest = self.seconds("generate"), self.trainer_seconds
        return generation + rest if self.takes_turns else max(generation, rest)

    @property
    def trainer_seconds(self) -> float:
        """Seconds of everything except generation."""
        return sum(phase.seconds for phase in self.phases if phase.name != "generate")

    def seconds(self, name: str) -> float:
        """Seconds of one phase, 0 where there is none of this name."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)


def plan_times(
    run: RunShape, gpu: GpuSpec, memory: MemoryPlan, lengths: Lengths, calibration: Calibration, *, sync: bool = True
) -> TimePlan:
    """The phases of one step of a run, without the update of the engines unless `sync`."""
    config = run.config
    roles = {role.name: role for role in run.roles}
    sampling, sequences = config.sampling, float(config.sequences_per_step)
    passes = {name: pass_seconds(run, role, gpu, lengths, sequences) for name, role in roles.items()}
    phases = []
    if run.engines is not None:
        if sync:
            in_turns = takes_turns(config, gpu.platform)
            sent = update_seconds(run.engines, gpu, memory, colocated=run.colocated, in_turns=in_turns)
            phases.append(PhaseTime("sync", sent))
        phases.append(PhaseTime("generate", generation_seconds(run, gpu, memory, lengths)))
    if sampling is not None:
        of_functions = {"rewards": sequences * calibration.reward_s_per_sample}
        scoring = [passes[role.name] for role in config.roles if role.scores]
        phases.append(PhaseTime("reward", _added(of_functions, *scoring)))
    # a role is counted for all rows: which of them ask it, only the data say
    frozen = [role.name for role in config.roles if role.trained is None and not role.scores]
    answering = [name for name in ("policy", *frozen, "critic") if name in roles]
    if not config.needs_old_log_probs:
        answering.remove("policy")
    elif config.first_update_is_a_pass and not calibration.whole_pass:
        later = 1 - config.epochs / config.optimizer_steps_per_step  # the share of a step outside its first mini-batch
        passes["policy"] = {part: later * seconds for part, seconds in passes["policy"].items()}
    if answering or sampling is not None:
        phases.append(PhaseTime("log_probs", _added(*(passes[name] for name in answering))))
    seen, updates = sequences * config.epochs, config.optimizer_steps_per_step
    trained = [roles[name] for name in ("critic", "policy") if name in roles]
    of_roles = [_update(run, role, gpu, lengths, seen, updates) for role in trained]
    # Roles on GPUs of their own update at the same time.
    longest = max(of_roles, key=lambda parts: sum(parts.values()))
    phases.append(PhaseTime("update", _added(*of_roles) if run.colocated else longest))
    if sampling is not None:
        phases.append(PhaseTime("other", {"driver": calibration.other_s}))
    one_by_one = sampling is None or sampling.schedule.mode == "sync"
    return TimePlan(_scaled(phases, calibration), one_by_one, sequences * (lengths.prompt + lengths.response))


def _scaled(phases: list[PhaseTime], calibration: Calibration) -> tuple[PhaseTime, ...]:
    return tuple(
        PhaseTime(phase.name, {part: seconds * calibration.scale(phase.name) for part, seconds in phase.parts.items()})
        for phase in phases
    )


def _added(*several: Mapping[str, float]) -> dict[str, float]:
    return {
        part: sum(parts.get(part, 0.0) for parts in several) for part in dict.fromkeys(p for parts in several for p in parts)
    }


def _update(
    run: RunShape, role: PlannedRole, gpu: GpuSpec, lengths: Lengths, sequences: float, updates: int
) -> dict[str, float]:
    """Forward and backward over `sequences` in `updates` optimizer steps."""
    precision = precision_of(run, gpu)
    anew = _computed_anew(role.shape, precision)
    # Of a part that is frozen, gradients of the weights are not computed; before the first one that is not, none are.
    decoder = 2.0 + _trained_share(role) + anew
    tower = 1.0 if "vision" in role.freeze or role.shape.lora is not None else 3.0 + (precision.recompute == "full")
    if role.trained is not None and role.trained.experts.balance_coef:  # a pass that counts loads comes before
        decoder, tower = decoder + 1.0, tower + 1.0
    times = Times(decoder, tower, prediction=decoder, anew=anew, trains=True)
    seconds = pass_seconds(run, role, gpu, lengths, sequences, updates=updates, times=times)
    fullest = max(role.parameters, key=lambda stage: stage.trained)
    replicas, of_experts = role.layout.dp * role.layout.cp, role.layout.edp
    state = role.state_bytes(precision.itemsize, precision.recipe)
    shared = fullest.trained_dense * (replicas - 1) / replicas + fullest.trained_expert * (of_experts - 1) / of_experts
    shard = fullest.trained_dense / replicas + fullest.trained_expert / of_experts
    offloaded = role.trained.optimizer.offload_fraction if role.trained is not None else 0.0
    s_per_gb = (1 - offloaded) / gpu.hbm_gb_per_s + offloaded / gpu.host_gb_per_s
    rate = gpu.link_gb_per_s(role.layout.world_size // role.layout.pp) * gpu.efficiencies.links * 1e9
    reduced = state.gradient * shared / rate
    if not precision.is_reference:  # beside the last micro-batch's backward pass
        tokens = sequences * (lengths.prompt + lengths.response) / role.layout.dp
        micro_batches = max(float(updates), tokens / role.max_tokens)
        reduced = max(0.0, reduced - (1 - 1 / decoder) * sum(seconds.values()) / micro_batches)
    return seconds | {
        "data parallel": updates * (reduced + precision.itemsize * shared / rate),
        "optimizer": updates * shard * state.touched(precision.itemsize) * s_per_gb / 1e9,
    }


def _trained_share(role: PlannedRole) -> float:
    """The share of the decoder's elements that have a gradient."""
    whole = sum(stage.dense + stage.expert - stage.tower for stage in role.parameters)
    frozen = sum(stage.frozen_dense + stage.frozen_expert - stage.frozen_tower for stage in role.parameters)
    return 1 - frozen / whole


def _computed_anew(shape: ModelShape, precision: Precision) -> float:
    """What the backward pass computes anew, of a forward pass; attention and activations count as nothing."""
    if precision.recompute != "selective" or precision.is_reference:
        return 1.0 if precision.recompute == "full" else 0.0
    matrices = shape.mlp_matrices
    dense = matrices * shape.ffn * shape.dense_layers
    experts = matrices * (shape.expert_ffn * shape.top_k + shape.shared_ffn) * len(shape.expert_layers)
    return dense / (dense + experts + 2 * (shape.query + shape.key_value) * shape.layers)


def update_seconds(engines: Engines, gpu: GpuSpec, memory: MemoryPlan, *, colocated: bool, in_turns: bool) -> dict[str, float]:
    """Seconds of sending, by the busiest link and what messages wait for one another; what each tensor takes; and where trainer
    and engines take turns, their turns.

    Engines that slept open every handle again, and take weights over at a rate of their own.
    """
    share, part = gpu.efficiencies, repeated_part(engines)
    link, seconds = sending_seconds(part, gpu.cluster, colocated=colocated)
    tensors = share.update_s + (1 + in_turns) * len(part.plan.tensors) * share.tensor_s
    parts = {link: seconds / share.links, "tensors": tensors}
    if in_turns:
        parts["main memory"] = 2 * memory.moved_bytes / (gpu.host_gb_per_s * share.links) / 1e9
        parts["engines' turn"] = engines.weight_bytes / share.turn_gb_per_s / 1e9
    return parts


def sending_seconds(engines: Engines, cluster: ClusterRates, *, colocated: bool) -> tuple[str, float]:
    """The link that an update's messages need longest, and their seconds at its full rate, with what they wait for one another.

    A test plays the messages of every ready plan through a simulated network (tests/weights/test_update_play.py).
    """
    cost = _cost(engines, cluster, colocated=colocated)
    bound, seconds = cost.bound, cost.seconds
    if not engines.relays_weights:
        return bound.name, WAITING[engines.transport] * seconds
    if bound.name == "InfiniBand":
        return bound.name, WAITING["relays"] * seconds
    of_links = {link.name: link.seconds for link in cost.links}  # a GPU's memory has both copies to make
    return bound.name, WAITING["shared_memory"] * max(seconds, of_links["same GPU"] + of_links["packing"])


@lru_cache(maxsize=32)
def _cost(engines: Engines, cluster: ClusterRates, *, colocated: bool) -> Cost:
    request = PlacementRequest({"policy": engines.trainer}, engines.target.engines, engines.target.ranks, colocated=colocated)
    return cost_of(engines.plan, cluster, colocated=colocated, placement=placement_of(request, cluster))


def repeated_part(engines: Engines) -> Engines:
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
