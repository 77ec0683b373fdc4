"""Seconds of forward and backward passes on a training rank: products, memory traffic, launches, messages, empty pipelines.

Messages are counted as megarl's trainer sends them: none at the same time as products, but gradients during the last
micro-batch's backward pass, and what stages send each other under `vpp` (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.models.flops import FlopsModel
from megarl.models.packings import padded_vocab
from megarl.models.vision import vision_part
from megarl.planning.activations import Precision, layer_activations
from megarl.planning.gpus import GpuSpec
from megarl.planning.lengths import Lengths
from megarl.planning.memory import precision_of
from megarl.planning.roles import PlannedRole, RunShape

FULL = 0.98
"""Share of the longest sequence: from this mean length on, sequences count as equally long."""
LOGIT_PASSES = 4
"""Times that logits in float32 are written or read: the product, the largest, the sum, the log-prob."""
AUTOGRAD = 4 / 3
"""Launches of a pass that autograd records, or replays, beside one that it doesn't."""
GRADIENT_BYTES = 8
"""Bytes of a weight's gradient in float32 that each micro-batch reads and writes."""


@dataclass(frozen=True)
class Times:
    """Number of times that a forward pass's parts are done: once, or with a backward pass, and with what that computes anew."""

    decoder: float = 1.0
    tower: float = 1.0
    prediction: float = 0.0
    anew: float = 0.0
    trains: bool = False

    def link(self, name: str, *, sequence_parallel: bool) -> float:
        """Messages of a forward pass are sent again in recomputation; a backward pass sends their gradients.

        With sequence parallelism it also gathers the inputs of products anew, for the gradients of weights; under context
        parallelism it sends the keys again, beside their gradients.
        """
        if not self.trains:
            return 1.0
        again = 1.0 if self.anew == 1.0 and name != "pipeline" else 0.0
        of_both = {"tensor parallel": 2.5 if sequence_parallel else 2.0, "context parallel": 3.0}
        return of_both.get(name, 2.0) + again


def pass_seconds(
    run: RunShape,
    role: PlannedRole,
    gpu: GpuSpec,
    lengths: Lengths,
    sequences: float,
    *,
    updates: int = 1,
    times: Times | None = None,
) -> dict[str, float]:
    """Seconds by part of passes over `sequences` in `updates` parts, before and after each of which the pipeline is empty.

    `tower` among them is what a tower adds to the pipeline's longest stage.
    """
    times = times or Times()
    layout, shape, share, precision = role.layout, role.shape, gpu.efficiencies, precision_of(run, gpu)
    of_stages = [sum(map(len, chunks)) for chunks in layout.stage_layers(shape.layers)]
    fullest = max(of_stages)
    of_a_layer = times.decoder * _products(role, gpu, precision, lengths, sequences) * layout.pp / shape.layers
    compute = of_a_layer * fullest
    prediction = FlopsModel.of(shape).prediction
    if prediction is not None and times.prediction:
        prompt, response = _rounded(lengths)
        operations = times.prediction * sequences * prediction.cost(max(0, prompt - 1), [response])
        of_last = operations / layout.world_size / peak_flops(gpu, precision) / share.products * layout.pp
        compute = max(compute, of_a_layer * of_stages[-1] + of_last)
    tokens = sequences * (lengths.prompt + lengths.response) / layout.dp  # of a replica
    micro_batches = max(float(updates), tokens / role.max_tokens)
    spent = {"arithmetic": compute, "memory traffic": _traffic(role, gpu, precision, lengths, tokens, micro_batches, times)}
    for name, seconds in _links(role, gpu, precision.itemsize, tokens, fullest).items():
        spent[name] = times.link(name, sequence_parallel=layout.sequence_parallel) * seconds
    passes = micro_batches * times.decoder * (AUTOGRAD if times.trains else 1.0)
    spent["launches"] = _waiting(role, gpu, precision, passes, sum(spent.values()))
    if lengths.pictures.most and shape.vision is not None:
        of_first = of_a_layer * of_stages[0] + times.tower * _tower_seconds(run, role, gpu, lengths, sequences)
        spent["tower"] = max(0.0, of_first - compute)
    if lengths.prompt + lengths.response < FULL * run.config.longest_sequence:
        spent = {name: seconds / share.unequal for name, seconds in spent.items()}
    bubble = (layout.pp - 1) * updates / (micro_batches * (layout.vpp or 1))
    return {name: part for name, part in (spent | {"pipeline bubble": bubble * sum(spent.values())}).items() if part}


def peak_flops(gpu: GpuSpec, precision: Precision) -> float:
    """Operations per second at the best, of products that are not in FP8; half in float32."""
    return gpu.peak_flops() / (1 if precision.itemsize == 2 or gpu.name == "cpu" else 2)


def _fullest_stage(role: PlannedRole) -> list[int]:
    """The layers of the stage that has most."""
    chunks = max(role.layout.stage_layers(role.shape.layers), key=lambda chunks: sum(map(len, chunks)))
    return [layer for chunk in chunks for layer in chunk]


def _rounded(lengths: Lengths) -> tuple[int, int]:
    return round(lengths.prompt), max(1, round(lengths.response))


def _products(role: PlannedRole, gpu: GpuSpec, precision: Precision, lengths: Lengths, sequences: float) -> float:
    """Seconds of a forward pass's operations, of a rank of a layout whose stages are all alike."""
    shape, share, flops = role.shape, gpu.efficiencies, FlopsModel.of(role.shape)
    prompt, response = _rounded(lengths)
    whole = flops.cost(prompt, [response])
    rows = flops.per_logit_row * response
    of_expert = 2 * shape.mlp_matrices * (shape.expert_latent or shape.hidden) * shape.expert_ffn
    of_experts = of_expert * shape.top_k * len(shape.expert_layers) * (prompt + response)
    of_layers = flops.per_token * (prompt + response) - of_experts
    peak = peak_flops(gpu, precision)
    rest = whole - rows - of_experts - of_layers + (0 if role.value_head else rows)
    eight_bit = share.fp8 * gpu.peak_flops(fp8=True) / peak if precision.fp8 else share.products
    seconds = rest / share.products + of_layers / eight_bit + of_experts / (share.experts * eight_bit / share.products)
    return sequences * seconds / peak / role.layout.world_size


def _traffic(
    role: PlannedRole, gpu: GpuSpec, precision: Precision, lengths: Lengths, tokens: float, micro_batches: float, times: Times
) -> float:
    """Seconds of a rank of the fullest stage for what is read and written between products: activations, weights, logits.

    What a layer keeps of a token is written and read once in a forward pass; a backward pass reads it, and writes and reads as
    many gradients. Weights are read by every micro-batch, and the gradients of trained ones read and written.
    """
    shape, layout = role.shape, role.layout
    passes = times.decoder if times.trains else 1.0
    layers = _fullest_stage(role)
    of_kind = {
        has_experts: layer_activations(
            shape, layout, precision, has_experts=has_experts, mean_length=lengths.prompt + lengths.response
        ).whole
        for has_experts in {layer in shape.expert_layers for layer in layers}
    }
    bytes_per_token = sum(of_kind[layer in shape.expert_layers] for layer in layers)
    moved = tokens / layout.cp * bytes_per_token * (5 + 2 * times.anew if times.trains else 2)
    fullest = max(role.parameters, key=lambda stage: stage.dense + stage.expert)
    moved += micro_batches * (fullest.products * precision.itemsize * passes + times.trains * fullest.trained * GRADIENT_BYTES)
    if not role.value_head:
        scored = tokens * lengths.response / (lengths.prompt + lengths.response) / layout.cp / layout.pp
        moved += scored * padded_vocab(shape.vocab, layout.tp) / layout.tp * 4 * LOGIT_PASSES * passes
    return moved / (gpu.hbm_gb_per_s * gpu.efficiencies.hbm * 1e9)


def _waiting(role: PlannedRole, gpu: GpuSpec, precision: Precision, passes: float, busy: float) -> float:
    """Seconds that GPUs wait for launches: where layers take less than the host needs to start them."""
    if precision.is_reference:
        return 0.0
    share, shape = gpu.efficiencies, role.shape
    layers = _fullest_stage(role)
    with_experts = sum(layer in shape.expert_layers for layer in layers)
    of_experts = share.layer_s if sends_once_to_a_node(role) else share.expert_layer_s
    return max(0.0, passes * ((len(layers) - with_experts) * share.layer_s + with_experts * of_experts) - busy)


def sends_once_to_a_node(role: PlannedRole) -> bool:
    """Return whether a token goes to each node once, whatever number of its experts is there (DeepEP, HybridEP)."""
    return role.trained is not None and role.trained.megatron.get("moe_token_dispatcher_type") == "flex"


def _tower_seconds(run: RunShape, role: PlannedRole, gpu: GpuSpec, lengths: Lengths, sequences: float) -> float:
    """Seconds of a tower over the pictures of `sequences`, whole on each rank of the first stage of a replica."""
    precision, flops = precision_of(run, gpu), FlopsModel.of(role.shape)
    prompts: float = vision_part("plan_pictures").prompts_computed(
        run.config, sequences, role.max_tokens, lengths.prompt, lengths.response, of_reference=precision.is_reference
    )
    operations = prompts / role.layout.dp * lengths.pictures.flops(flops)
    return operations / peak_flops(gpu, precision) / gpu.efficiencies.products


def _links(role: PlannedRole, gpu: GpuSpec, itemsize: int, tokens: float, layers: int) -> Mapping[str, float]:
    """Seconds of a forward pass's messages of one rank, for `tokens` of its replica and `layers` of its stage."""
    layout, shape = role.layout, role.shape
    row = shape.hidden * itemsize
    local = tokens / layout.cp
    tensor = 4 * layers * local * row * (layout.tp - 1) / layout.tp
    width = shape.kv_heads * shape.of_kv_head / layout.tp
    linear = len(shape.linear.layers) / shape.layers if shape.linear else 0.0  # of the layers
    gathered = (1 - linear) * tokens * width  # keys and values of all tokens
    of_token = shape.linear.exchanged(layout.tp, layout.cp) or 0 if shape.linear else 0
    exchanged = linear * local * of_token / layout.tp
    context = layers * (gathered + exchanged) * itemsize * (layout.cp - 1) / layout.cp
    with_experts = layers * len(shape.expert_layers) / shape.layers
    tensor, context = shape.traits.sublayers * tensor, shape.traits.sublayers * context
    rows = local / (layout.tp if layout.sequence_parallel else 1)
    of_copy = 2 * with_experts * rows * row
    size = layout.ep * layout.etp
    copies = shape.top_k * layout.etp * (layout.ep - 1) / layout.ep
    nodes = max(1.0, size / gpu.nvlink_gpus)
    within = copies / nodes  # ranks of a node share experts over NVLink; of the rest of the group all is beyond it
    beyond = copies - within
    if sends_once_to_a_node(role):
        beyond = (nodes - 1) * (1 - (1 - 1 / nodes) ** shape.top_k)
        within = copies
    between = 2 * rows * row * shape.traits.streams
    pipeline = between if layout.pp > 1 and not layout.vpp else 0.0  # under vpp sent beside products
    seconds = {
        "tensor parallel": tensor / gpu.link_gb_per_s(layout.tp),
        "context parallel": context / gpu.link_gb_per_s(layout.tp * layout.cp),
        "expert parallel": of_copy * (within / gpu.nvlink_gb_per_s + beyond / gpu.network_gb_per_s),
        "pipeline": pipeline / gpu.network_gb_per_s,
    }
    return {name: spent / gpu.efficiencies.links / 1e9 for name, spent in seconds.items() if spent}
