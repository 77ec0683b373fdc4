"""Bytes on every GPU, and in main memory: what each role keeps, what the engines keep, and what there is at the worst moment.

Parameters are exact. A process keeps what its allocator once took, so the worst moments of processes that share a GPU add up,
those of one process do not. Where trainer and engines take turns (`turns.py`) each turn is counted for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.megatron.options import default_chunk_tokens
from megarl.models.adapters import adapter_part
from megarl.models.packings import padded_vocab
from megarl.models.vision import vision_part
from megarl.option_list import functions
from megarl.planning.activations import STATISTICS, LayerActivations, Precision, layer_activations, norm
from megarl.planning.engine_memory import engine_working_bytes, staged_bytes
from megarl.planning.gpu_memory import GpuMemory, MemoryPlan
from megarl.planning.gpus import PROCESS_BYTES, GpuSpec
from megarl.planning.lengths import Lengths
from megarl.planning.parameters import ParameterCounts
from megarl.planning.schedules import in_flight
from megarl.planning.turns import (
    ALL_AT_ONCE,
    ASLEEP_BYTES,
    RESIDENT,
    Kept,
    OfEngine,
    lends,
    reserve_bytes,
    static_bytes,
    takes_turns,
)
from megarl.weights.run_plan import ITEMSIZE

if TYPE_CHECKING:
    from megarl.planning.roles import Engines, PlannedRole, RunShape

REMAINDER_BYTES = 2
"""Bytes of a bfloat16 weight that is a moving average: float32's further ones, on every rank that has the weight."""
STATIC = ("parameters", "gradients", "optimizer")
MOMENTARY = ("activations", "tower activations", "logits", "communication", "optimizer step")
"""Memory of a forward and backward pass, and of the optimizer's step that follows it."""
ENGINES = ("engine", "lent")
"""Engines with GPUs of their own or of all, and those that the trainer's GPUs are lent to."""
HOST_BYTES_OF_A_PARAMETER = 16
"""In main memory of what is offloaded: both moments, the float32 weight, and its gradient."""


@dataclass(frozen=True)
class RoleMemory:
    """One role on a rank of one stage, in bytes by part (`STATIC`, `MOMENTARY`); `host` is in main memory.

    `weights` are its parameters without the FP8 copies that Transformer Engine makes of them; `unpacked` are those that are in
    FP8 alone as they are sent to engines.
    """

    role: str
    parts: Mapping[str, float]
    weights: float
    unpacked: float
    host: float

    @property
    def momentary(self) -> float:
        """The most that this role takes besides, in a pass or in the optimizer's step."""
        return sum(self.busiest.values())

    @property
    def busiest(self) -> dict[str, float]:
        """The parts that are there at the worst moment besides those that always are."""
        *of_pass, of_step = MOMENTARY
        pass_bytes = {part: self.parts[part] for part in of_pass}
        return pass_bytes if sum(pass_bytes.values()) >= self.parts[of_step] else {of_step: self.parts[of_step]}

    @property
    def moved(self) -> float:
        """What goes to main memory while engines generate; gradients are made anew."""
        return self.weights + self.parts["optimizer"]


@dataclass(frozen=True)
class Workload:
    """What a role is run on: `tokens` of a micro-batch, `scored` of them with a log-prob, `micro_batches` of an update.

    `patches` are those of the pictures that a micro-batch shows.
    """

    tokens: int
    scored: int
    micro_batches: int
    mean_length: float
    patches: float = 0.0


def precision_of(run: RunShape, gpu: GpuSpec) -> Precision:
    """The precision of activations on such a GPU."""
    model = run.config.model
    spec = model.layer_spec if model.layer_spec != "auto" else "reference" if gpu.name == "cpu" else "transformer_engine"
    recipe = model.fp8_recipe if model.fp8 != "none" else None
    how = recipe, model.fp8_param, model.int4_experts > 0
    return Precision(spec, ITEMSIZE[model.dtype], model.recompute, *how, gpu.platform)


def role_memory(role: PlannedRole, stage: int, precision: Precision, work: Workload) -> RoleMemory:
    """The bytes of `role` on a rank of a pipeline stage.

    Raises:
        LayoutError: the layout does not divide the model.
    """
    counts = role.parameters[stage]
    parameters = weights = (counts.dense + counts.expert) * precision.itemsize + 4 * (counts.value_head + counts.buffers)
    if precision.fp8 and not precision.fp8_param:
        # FP8 copies for both directions, beside the BF16 weights; without these in their place
        parameters += 2 * counts.products
    parts = dict.fromkeys((*STATIC, *MOMENTARY), 0.0) | {"parameters": float(parameters)}
    host = 0.0
    if role.averaged and precision.itemsize == 2:
        parts["optimizer"] = REMAINDER_BYTES * float(counts.dense + counts.expert)
    if role.trained is not None:
        share, offloaded = _shard(counts, role), role.trained.optimizer.offload_fraction
        of_each, of_head = (role.state_bytes(size, precision.recipe) for size in (precision.itemsize, 4))
        head, here = counts.value_head / _replicas(role), 1 - offloaded
        parts["gradients"] = float(
            of_each.gradient * (counts.trained - counts.value_head) + of_head.gradient * counts.value_head
        )
        parts["optimizer"] = (share * (of_each.moments + of_each.master) + head * (of_head.moments + of_head.master)) * here
        if role.trained.optimizer.name == "muon":  # its matrices have one moment
            parts["optimizer"] -= of_each.moments / 2 * _matrices(counts, role)
        parts["optimizer step"] = share * of_each.step * here
        parts["activations"] = activation_bytes(role, stage, precision, work)
        host = share * offloaded * HOST_BYTES_OF_A_PARAMETER
        host += role.kept_models * (counts.trained * precision.itemsize + parts["gradients"] + parts["optimizer"])
        host += checkpoint_bytes(role, stage, precision.itemsize)
    if stage == 0 and work.patches:
        parts["tower activations"] = tower_bytes(role, precision, work)
    if stage == role.layout.pp - 1 and not role.value_head:
        parts["logits"] = _logits(role, precision, work)
        further = sum(further_parameters(role, stage) for further_parameters in functions("plan", "further_parameters"))
        parts["parameters"] += further * precision.itemsize
    parts["communication"] = _communication(role, stage, precision, work)
    unpacked = float(counts.products * precision.itemsize if precision.fp8_param else 0)
    return RoleMemory(role.name, parts, weights, unpacked, host)


def tower_memory(role: PlannedRole, precision: Precision, work: Workload) -> dict[str, float]:
    """The vision tower's bytes by part in what `role_memory` counts on a rank of the first stage; empty: it has none."""
    counts, of_each = role.parameters[0], role.state_bytes(precision.itemsize, precision.recipe)
    if not counts.tower:
        return {}
    trained = counts.tower - counts.frozen_tower if role.trained is not None else 0
    here = 1 - role.trained.optimizer.offload_fraction if role.trained is not None else 0
    return {
        "parameters": float(counts.tower * precision.itemsize),
        "gradients": float(trained * of_each.gradient),
        "optimizer": trained / _replicas(role) * (of_each.moments + of_each.master) * here,
        "activations": tower_bytes(role, precision, work),
    }


def stored_bytes(itemsize: int) -> int:
    """Bytes of a parameter in a checkpoint, whose copy in main memory a rank keeps: the weight, its master copy, two
    moments."""
    return itemsize + 8 + (4 if itemsize < 4 else 0)


def checkpoint_bytes(role: PlannedRole, stage: int, itemsize: int) -> float:
    """Bytes of a checkpoint of a trained role that a rank of a stage contributes, for weights of `itemsize` bytes.

    What tensor-parallel ranks hold alike one of them contributes; it is counted on each.
    """
    assert role.trained is not None, "checkpoints are of what is trained"
    counts = role.parameters[stage]
    nbytes = _shard(counts, role) * stored_bytes(itemsize) + counts.value_head / _replicas(role) * stored_bytes(4)
    if role.trained.optimizer.name == "muon":
        nbytes -= 4 * _matrices(counts, role)
    if role.shape.lora is None:  # beside adapters, what is not trained is in no checkpoint
        nbytes += (counts.frozen_dense / _replicas(role) + counts.frozen_expert / role.layout.edp) * itemsize
    return nbytes


def _replicas(role: PlannedRole) -> int:
    return role.layout.dp * role.layout.cp


def _shard(held: ParameterCounts, role: PlannedRole) -> float:
    """Elements whose optimizer state this rank has."""
    return held.trained_dense / _replicas(role) + held.trained_expert / role.layout.edp


def _matrices(held: ParameterCounts, role: PlannedRole) -> float:
    """The elements of `_shard` that Muon updates: elements of trained matrices of layers."""
    return held.dense_matrices / _replicas(role) + held.expert_matrices / role.layout.edp


def activation_bytes(role: PlannedRole, stage: int, precision: Precision, work: Workload) -> float:
    """The most that is kept for the backward pass at once: megatron-core's 1F1B schedule, interleaved where `vpp` is set."""
    passes = in_flight(role.layout.pp, role.layout.vpp or 1, stage, work.micro_batches)
    return passes * _kept_of_a_pass(role, stage, precision, work) + _at_the_end(role, stage, precision, work)


def _layers(role: PlannedRole, stage: int, precision: Precision, work: Workload) -> list[LayerActivations]:
    shape, layout = role.shape, role.layout
    layers = [layer for chunk in layout.stage_layers(shape.layers)[stage] for layer in chunk]
    linear = shape.linear.layers if shape.linear else frozenset()
    beside = adapter_part("plan") if shape.lora is not None else None
    adapted = {layer: beside.rules_of_layer(shape, layer) if beside is not None else () for layer in layers}
    alone = shape.traits.mlp_alone, shape.traits.attention_alone
    kind_of = {
        layer: (layer in shape.expert_layers, layer in linear, adapted[layer], layer not in alone[0], layer not in alone[1])
        for layer in layers
    }
    kinds = {
        kind: layer_activations(
            shape,
            layout,
            precision,
            has_experts=kind[0],
            is_linear=kind[1],
            attends=kind[3],
            has_mlp=kind[4],
            mean_length=work.mean_length,
            adapters=beside.kept_of_layer(shape, layer, layout, precision) if beside is not None else None,
        )
        for kind, layer in {kind: layer for layer, kind in kind_of.items()}.items()
    }
    activations = [kinds[kind_of[layer]] for layer in layers]
    if shape.predicts and stage == layout.pp - 1:
        experts = bool(shape.experts)
        activations.append(layer_activations(shape, layout, precision, has_experts=experts, mean_length=work.mean_length))
    return activations


def _kept_of_a_pass(role: PlannedRole, stage: int, precision: Precision, work: Workload) -> float:
    """What a stage keeps of a micro-batch until its backward pass."""
    shape, recompute = role.shape, precision.recompute
    tokens = work.tokens / role.layout.cp
    kept_bytes = tokens * sum(layer.kept(recompute) for layer in _layers(role, stage, precision, work))
    if stage == 0:
        kept_bytes += tokens * 8
    if recompute == "full" and shape.latent is None:
        kept_bytes += tokens * 4 * shape.head_dim  # the rotary angles, once for all layers
    if recompute != "full":
        kept_bytes += sum(role.rounded_experts(stage, precision))
    if recompute != "full" and shape.lora is not None:
        layers = (layer for chunk in role.layout.stage_layers(shape.layers)[stage] for layer in chunk)
        kept_bytes += sum(adapter_part("plan").spread_bytes(shape, layer, role.layout, precision.itemsize) for layer in layers)
    return kept_bytes + tokens * sum(of_option(role, stage, precision) for of_option in functions("plan", "kept_behind_layers"))


def _at_the_end(role: PlannedRole, stage: int, precision: Precision, work: Workload) -> float:
    """What there is besides in the backward pass, which frees what follows the layers before it computes a layer anew."""
    anew = max(layer.recomputed(precision.recompute) for layer in _layers(role, stage, precision, work))
    rounded = max(role.rounded_experts(stage, precision), default=0.0) if precision.recompute == "full" else 0.0
    return max(_after_layers(role, stage, precision, work), work.tokens / role.layout.cp * anew + rounded)


def tower_bytes(role: PlannedRole, precision: Precision, work: Workload) -> float:
    """Bytes that a vision tower adds to the activations of the first stage."""
    freed = 0.0
    if role.trained is not None:  # when the tower's turn comes, the decoder's part of this micro-batch is freed
        freed = _kept_of_a_pass(role, 0, precision, work) + _at_the_end(role, 0, precision, work)
    nbytes: float = vision_part("plan_towers").tower_bytes(role, precision, work, freed)
    return nbytes


def _after_layers(role: PlannedRole, stage: int, precision: Precision, work: Workload) -> float:
    """On the last stage, where a single micro-batch is: the last norm and the rows that are scored."""
    layout, hidden = role.layout, role.shape.hidden
    if stage < layout.pp - 1:
        return 0.0
    rows = 1 / layout.tp if layout.sequence_parallel else 1.0
    of_scored = hidden * precision.itemsize + 3 * 8 + 2 * STATISTICS
    return (work.tokens * rows * norm(hidden, precision) + work.scored * of_scored) / layout.cp


def _logits(role: PlannedRole, precision: Precision, work: Workload) -> float:
    """Two buffers of a chunk's logits; in the backward pass also the output matrix's gradient in float32 and its copy."""
    rows = padded_vocab(role.shape.vocab, role.layout.tp) // role.layout.tp
    scored = max(1, work.scored // role.layout.cp)
    chunk = min(role.logit_chunk_tokens or default_chunk_tokens(precision.device_type, rows), scored)
    is_trained = role.trained is not None and role.shape.lora is None
    gradient = rows * role.shape.hidden * (4 + precision.itemsize) if is_trained else 0
    return 2.0 * chunk * rows * 4 + gradient + scored * role.shape.hidden * precision.itemsize


def _communication(role: PlannedRole, stage: int, precision: Precision, work: Workload) -> float:
    """Buffers that no backward pass keeps: the gathered stream, what goes to a stage's neighbours, the experts' tokens.

    On the first stage also the stream that features are put into, and one for each layer behind which deepstack adds some.
    """
    layout, shape = role.layout, role.shape
    stream = work.tokens / layout.cp * shape.hidden * precision.itemsize
    rows = 1 / layout.tp if layout.sequence_parallel else 1.0
    total = stream if layout.sequence_parallel else 0.0
    total += 2 * stream * rows * shape.traits.streams if layout.pp > 1 else 0.0
    if stage == 0 and work.patches and shape.vision is not None:
        total += (1 + len(shape.vision.deepstack)) * stream
    if shape.experts and layout.ep * layout.etp > 1:
        total += 2 * stream * rows * shape.top_k * layout.etp
    return total


def plan_memory(run: RunShape, gpu: GpuSpec, lengths: Lengths) -> MemoryPlan:
    """Plan what every GPU of a run holds.

    Raises:
        LayoutError: a layout does not divide its model.
    """
    precision = precision_of(run, gpu)
    by_stage = {
        role.name: [
            role_memory(role, stage, precision, workload(run, role, precision, lengths)) for stage in range(role.layout.pp)
        ]
        for role in run.roles
    }
    places = run.places
    kinds: dict[tuple[tuple[str, int], ...], list[range]] = {}
    bounds = sorted(_bounds(run))
    for number in bounds[:-1]:
        occupants = [
            (role.name, _stage(role, number, places[role.group])) for role in run.roles if number in places[role.group]
        ]
        occupants += [(name, 0) for name in ENGINES if number in places.get(name, ())]
        kinds.setdefault(tuple(occupants), []).append(range(number, bounds[bounds.index(number) + 1]))
    of_kinds = {occupants: _gpu(run, gpu, by_stage, occupants, numbers, lengths) for occupants, numbers in kinds.items()}
    counted = tuple(of_kinds.values())
    if run.engines is None:
        return MemoryPlan(counted, gpu.usable_bytes, 0, 0)
    most_moved = 0.0
    if takes_turns(run.config, gpu.platform) or lends(run.config, gpu.platform):
        most_moved = max(
            sum(by_stage[name][stage].moved for name, stage in occupants if name not in ENGINES) for occupants in kinds
        )
    length, caches = run.config.longest_parts[0] + lengths.response, [(0, 0)]
    for name in ENGINES:  # those that are lent last
        of_these = [kind for occupants, kind in of_kinds.items() if (name, 0) in occupants]
        awake = [parts for kind in of_these for turn, parts in kind.turns.items() if RESIDENT[turn].engine == "all"]
        if not awake:
            continue
        room = min(gpu.usable_bytes - sum(parts.values()) for parts in awake)
        caches.append(_kv_tokens(run, run.engines, gpu, room, lengths.response, is_sized=_is_sized(run, gpu, name)))
        for parts in awake:
            parts[("engine", "KV cache")] = caches[-1][0] * run.engines.cached_bytes_per_token(length)
    return MemoryPlan(counted, gpu.usable_bytes, *caches[1], most_moved)


def workload(run: RunShape, role: PlannedRole, precision: Precision, lengths: Lengths) -> Workload:
    """Full micro-batches of the longest sequences: the worst that a config allows. Pictures are those of the prompts that show
    most, as many as there is room for with responses of mean length."""
    config, longest = run.config, run.config.longest_sequence
    mini_batches = config.optimizer_steps_per_step // config.epochs
    per_rank = config.sequences_per_step // mini_batches // role.layout.dp
    patches = 0.0
    if role.shape.vision is not None:
        count = vision_part("plan_pictures").prompts_at_once
        at_once = count(config, role.max_tokens, lengths.response, of_reference=precision.is_reference)
        patches = float(max(1, min(per_rank, at_once)) * lengths.pictures.most_patches)
    if config.sampling is None:  # any share of a given row may be its response, and a row may fill a micro-batch
        return Workload(role.max_tokens, role.max_tokens, max(1, per_rank), longest, patches)
    micro_batches = max(1, math.ceil(per_rank / (role.max_tokens // longest)))
    tokens = min(role.max_tokens, per_rank * longest)
    scored = math.ceil(tokens * config.longest_parts[1] / longest)
    return Workload(tokens, scored, micro_batches, longest, patches)


def _bounds(run: RunShape) -> set[int]:
    """The GPUs from which on others hold something else, and the number of all."""
    bounds = {0, run.gpus}
    for name, gpus in run.places.items():
        layout = run.groups.get(name)
        step = layout.world_size // layout.pp if layout is not None else len(gpus)
        bounds |= {*range(gpus.start, gpus.stop, step), gpus.stop}
    return bounds


def _stage(role: PlannedRole, gpu: int, place: range) -> int:
    return (gpu - place.start) // (role.layout.world_size // role.layout.pp)


def _gpu(
    run: RunShape,
    gpu: GpuSpec,
    by_stage: Mapping[str, list[RoleMemory]],
    held: tuple[tuple[str, int], ...],
    numbers: list[range],
    lengths: Lengths,
) -> GpuMemory:
    groups = {role.name: role.group for role in run.roles}
    in_turns, lending = takes_turns(run.config, gpu.platform), lends(run.config, gpu.platform)
    memories = [by_stage[name][stage] for name, stage in held if name not in ENGINES]
    processes = len({groups[memory.role] for memory in memories})
    has_engine, has_policy = len(memories) < len(held), any(groups[memory.role] == "policy" for memory in memories)
    staging = 0.0
    if run.engines is not None and has_policy:
        of_policy = sum(memory.unpacked for memory in memories if memory.role == "policy")
        staging = staged_bytes(run, run.engines, gpu.platform) if run.engines.stages_weights else of_policy
    trainer, sent = _trainer(groups, memories), {("policy", "staging"): staging}
    engine, of_weights = dict[tuple[str, str], float](), dict[tuple[str, str], float]()
    if has_engine:
        assert run.engines is not None
        reserve = reserve_bytes(gpu) if _is_sized(run, gpu, held[-1][0]) else 0.0
        working = max(engine_working_bytes(run.engines, lengths), reserve)
        of_weights = {("engine", "parameters"): float(run.engines.weight_bytes)}
        of_weights[("engine", "adapters")] = float(run.engines.adapter_bytes)
        engine = of_weights | {("engine", "working"): working}
    contexts = {("process", "contexts"): (processes + has_engine) * PROCESS_BYTES}
    host = sum(memory.host for memory in memories)
    host += run.engines.kept_bytes if run.engines is not None and has_engine else 0
    if in_turns or lending:
        host += sum(memory.moved for memory in memories)
    takes_some = in_turns or (lending and ("lent", 0) in held)
    policy = {("policy", "parameters"): sum(memory.weights for memory in memories if memory.role == "policy")}
    kept: Mapping[Kept, dict[tuple[str, str], float]] = {"all": trainer, "policy": policy, "none": {}}
    asleep = {("process", "contexts"): processes * PROCESS_BYTES, ("engine", "asleep"): has_engine * ASLEEP_BYTES}
    of_engine: Mapping[OfEngine, dict[tuple[str, str], float]] = {
        "all": engine | contexts,
        "weights": of_weights | asleep,
        "none": asleep,
    }
    turns = {
        turn: kept[there.trainer] | of_engine[there.engine] | (sent if there.sends else {})
        for turn, there in RESIDENT.items()
        if (turn == ALL_AT_ONCE) != takes_some
    }
    filled = {turn: {name: size for name, size in parts.items() if size} for turn, parts in turns.items()}
    return GpuMemory(numbers[0].start, sum(map(len, numbers)), filled, host)


def _trainer(groups: Mapping[str, str], memories: list[RoleMemory]) -> dict[tuple[str, str], float]:
    """What all roles of a GPU keep, and the most that one of each process takes besides."""
    parts = {(memory.role, part): memory.parts[part] for memory in memories for part in STATIC}
    for group in dict.fromkeys(groups[memory.role] for memory in memories):
        busiest = max((memory for memory in memories if groups[memory.role] == group), key=lambda memory: memory.momentary)
        parts |= {(busiest.role, part): size for part, size in busiest.busiest.items()}
    return parts


def _is_sized(run: RunShape, gpu: GpuSpec, name: str) -> bool:
    """Return whether megarl chooses what engines of this name have of a GPU."""
    in_turns = takes_turns(run.config, gpu.platform) or (name == "lent" and lends(run.config, gpu.platform))
    return run.engines is not None and run.engines.memory_fraction is None and in_turns


def _kv_tokens(
    run: RunShape, engines: Engines, gpu: GpuSpec, room: float, response_tokens: float, *, is_sized: bool
) -> tuple[int, int]:
    """(tokens that the cache of a rank has room for, those that a step would fill at once)."""
    longest_prompt, _ = run.config.longest_parts
    length, longest = longest_prompt + response_tokens, run.config.longest_sequence
    ranks_sharing = engines.target.engines * engines.target.dp
    step_tokens = max(longest, math.ceil(run.config.sequences_per_step / ranks_sharing * length))
    of_token = engines.cached_bytes_per_token(length)
    if engines.max_total_tokens is not None:
        return engines.max_total_tokens, step_tokens
    if engines.memory_fraction is not None:
        pool = engines.memory_fraction * gpu.memory_gb * 1e9 - engines.weight_bytes - engines.adapter_bytes
        return max(longest, int(pool / of_token)), step_tokens
    if is_sized:
        room = min(static_bytes(run.config, gpu) - engines.weight_bytes - engines.adapter_bytes, room)
    return min(step_tokens, max(longest, int(room / of_token))), step_tokens
