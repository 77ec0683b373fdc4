"""What a layer keeps of every token for the backward pass, operation by operation, for the layer specs that there are.

The lists of the `reference` spec are what autograd saves in megarl's own modules and is checked against it
(tests/planning/test_memory.py); those of Transformer Engine follow its modules (LayerNormLinear, fused attention and SwiGLU)
and have not been compared with a GPU. Bytes per token of the stream; full recomputation keeps a layer's input only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.layout import Layout
from megarl.models.architecture import LinearAttention
from megarl.models.shape import ModelShape

STATISTICS = 4
"""Bytes of a norm's statistics per row, of the log-sum-exp of a head: float32."""


@dataclass(frozen=True)
class Precision:
    """The precision of a run: bytes of an element, what is recomputed, the recipe of products in FP8, their weights in
    FP8 only.

    `rounds_experts`: the policy computes with a rounded copy of its experts' weights.
    """

    layer_spec: str
    itemsize: int
    recompute: str = "none"
    recipe: str | None = None
    fp8_param: bool = False
    rounds_experts: bool = False
    device_type: str = "cuda"

    @property
    def fp8(self) -> bool:
        """Return whether matrix products are in FP8."""
        return self.recipe is not None

    @property
    def operand(self) -> int:
        """Bytes of an element that a matrix product reads."""
        return 1 if self.fp8 else self.itemsize

    @property
    def is_reference(self) -> bool:
        """Return whether layers are plain torch."""
        return self.layer_spec != "transformer_engine"


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per token of this rank's stream (which context parallelism has shared out), of one layer.

    `whole` is without recomputation, `selected` what selective recomputation computes anew of it, `inputs` what it keeps in
    its place, `checkpoint` what full recomputation keeps.
    """

    whole: float
    selected: float
    inputs: float
    checkpoint: float

    def kept(self, recompute: str) -> float:
        """What stays from the forward to the backward pass."""
        if recompute == "full":
            return self.checkpoint
        return self.whole - self.selected + self.inputs if recompute == "selective" else self.whole

    def recomputed(self, recompute: str) -> float:
        """What the layer under way has anew in the backward pass."""
        return {"none": 0.0, "selective": self.selected, "full": self.whole}[recompute]


def layer_activations(
    shape: ModelShape,
    layout: Layout,
    precision: Precision,
    *,
    has_experts: bool,
    mean_length: float,
    is_linear: bool = False,
    attends: bool = True,
    has_mlp: bool = True,
    adapters: Mapping[str, float] | None = None,
) -> LayerActivations:
    """The activations of a layer with or without experts, whose attention `is_linear` or not; it may be one of both alone.

    `mean_length`: tokens of the sequence that a token is in. `adapters`: their part of attention and MLP (`adapters.py`).
    """
    rows = 1 / layout.tp if layout.sequence_parallel else 1.0
    attention, mlp = (0.0, 0.0, 0.0), 0.0
    if not attends:
        pass
    elif shape.linear is not None and is_linear:
        attention = _linear(shape, shape.linear, layout, precision, rows, mean_length)
    elif shape.latent:
        attention = _latent(shape, layout, precision, rows, mean_length)
    else:
        attention = _of_all_heads(shape, layout, precision, rows, mean_length)
    outside, core, core_inputs = attention
    if has_mlp:
        mlp = _experts(shape, layout, precision, rows) if has_experts else _dense(shape, layout, precision, rows)
    if (halves := shape.traits.sublayers) > 1:  # of attention and an MLP; the first one's norm is that of the experts, too
        outside, core, core_inputs = halves * outside, halves * core, halves * core_inputs
        mlp += halves * _dense(shape, layout, precision, rows) - rows * norm(shape.hidden, precision)
    if adapters is not None:
        outside, mlp = outside + adapters["self_attention"], mlp + adapters["mlp"]
    checkpoint = rows * shape.hidden * precision.itemsize * shape.traits.streams
    if precision.is_reference:
        return LayerActivations(outside + core + mlp, core, core_inputs, checkpoint)
    # `model_config.recompute_modules`: a dense MLP with its norm, else the experts' activations and their norm's output; of
    # latent attention the layer's norm and all that is projected up from the latents.
    selected = _experts_selected(shape, layout, precision, rows) if has_experts else mlp
    if shape.latent:
        selected += rows * precision.operand * shape.hidden + core_inputs
    return LayerActivations(outside + core + mlp, selected, 0.0 if has_experts else checkpoint, checkpoint)


def norm(width: float, precision: Precision) -> float:
    """Bytes per row: of the reference layers the normalised input in float32; of Transformer Engine's the input."""
    return (4 if precision.is_reference else precision.itemsize) * width + STATISTICS


def _branch_norms(shape: ModelShape, precision: Precision) -> float:
    """Bytes per row of the norms before and behind a layer's attention, or its MLP."""
    return (shape.traits.pre_norms + shape.traits.post_norms) * norm(shape.hidden, precision)


def _of_all_heads(
    shape: ModelShape, layout: Layout, precision: Precision, rows: float, mean_length: float
) -> tuple[float, float, float]:
    """The answer of `_grouped`, as a mean over layers whose heads are not alike."""
    kinds = [
        (len(layers) / shape.layers, _grouped(kind, layout, precision, rows, mean_length)) for kind, layers in shape.by_heads
    ]
    outside, core, inputs = (sum(share * of_kind[at] for share, of_kind in kinds) for at in range(3))
    return outside, core, inputs


def _grouped(
    shape: ModelShape, layout: Layout, precision: Precision, rows: float, mean_length: float
) -> tuple[float, float, float]:
    """(outside core attention, in it, its inputs)."""
    size, query = precision.itemsize, shape.query / layout.tp
    key = max(shape.key_value / layout.tp, shape.head_dim)  # fewer KV heads than ranks: each has a whole one
    heads, key_heads = shape.heads / layout.tp, key / shape.head_dim
    value, result = key_heads * shape.value_dim, heads * shape.value_dim
    projected = (query + key + value) * size
    outside = rows * (_branch_norms(shape, precision) + precision.operand * shape.hidden)
    outside += 4 * shape.head_dim * size  # cosines and sines, of queries and of keys
    outside += result * precision.operand  # the output projection's input
    if shape.head_norms and shape.traits.projection_norms:  # keeps what it norms; the keys are a view of all that was projected
        outside += query * size + projected + 2 * STATISTICS
    elif shape.head_norms:
        outside += norm(query, precision) + norm(key, precision) + STATISTICS * (heads + key_heads - 2)
    # Values are a view of all that was projected, unless they are multiplied.
    core_inputs = query * size + key * size + (projected if shape.traits.values is None else value * size)
    if precision.is_reference:
        keys = (2 * layout.cp + 1) / 2 if layout.cp > 1 else 1.0  # gathered: those that a rank's early and late chunks look at
        core = size * (query + 2 * result + (key + value) * keys) + STATISTICS * heads
        if shape.sinks:  # scores of each token and one that it may attend to, keys and values of every head; no output
            core += size * ((heads * mean_length + query - key + result - value) * keys - result)
        elif shape.value_dim != shape.head_dim:  # for which torch computes all scores, in float32, with keys of every head
            core = 4 * (query + (query + result + heads * mean_length) * keys) + size * result
        elif shape.traits.score_cap is not None:  # scores as capped, and the shares of attention, in float32 and as multiplied
            of_score = size + 4 + (size if size < 4 else 0)
            core += (of_score * heads * mean_length + 2 * size * (query - key)) * keys - size * query
        return outside, core, core_inputs
    core, output = core_inputs + result * size + STATISTICS * heads, 0 if precision.fp8 else result * size
    return outside - output, core, core_inputs + output


def _latent(
    shape: ModelShape, layout: Layout, precision: Precision, rows: float, mean_length: float
) -> tuple[float, float, float]:
    latent, size, operand = shape.latent, precision.itemsize, precision.operand
    assert latent is not None
    heads = shape.heads / layout.tp
    query, value, both = heads * shape.head_dim, heads * shape.value_dim, latent.key_value + latent.rope
    outside = rows * (norm(shape.hidden, precision) + operand * shape.hidden)
    if latent.query:
        outside += rows * (norm(latent.query, precision) + operand * latent.query)
    outside += rows * (norm(latent.key_value, precision) + operand * latent.key_value)
    outside += latent.rope * size  # cosines and sines
    outside += value * operand  # the output projection's input
    core_inputs = (2 * query + value + heads * latent.nope) * size
    if shape.indexer is not None:  # scores are computed anew, and choices of keys are kept, as int32
        choices = 4 * min(shape.indexer.top_k, mean_length) * shape.indexer.layers / shape.layers
        return outside, core_inputs + choices, core_inputs
    if precision.is_reference:  # widths of keys and values differ, for which torch computes all scores, in float32
        core = 4 * (2 * query + value + heads * mean_length) + size * value
        return outside, core, core_inputs
    core = core_inputs + value * size + STATISTICS * heads
    return outside + both * rows * size - (0 if precision.fp8 else value * size), core, core_inputs


def _linear(
    shape: ModelShape, linear: LinearAttention, layout: Layout, precision: Precision, rows: float, mean_length: float
) -> tuple[float, float, float]:
    """All outside core attention: selective recomputation keeps it."""
    plain, operand = precision.is_reference, precision.operand
    kept_bytes = linear.kept_bytes(layout.tp, precision.itemsize, operand, mean_length, plain=plain)
    return rows * (norm(shape.hidden, precision) + operand * shape.hidden) + kept_bytes, 0.0, 0.0


def _dense(shape: ModelShape, layout: Layout, precision: Precision, rows: float) -> float:
    inputs = rows * (_branch_norms(shape, precision) + precision.operand * shape.hidden)
    return inputs + _between(shape, shape.ffn / layout.tp, precision)


def _between(shape: ModelShape, width: float, precision: Precision) -> float:
    """Gate and up, and the second product's input; torch also keeps the activated gate and a copy of up. Without a gate what
    is squared, and the second product's input."""
    if not shape.gated_mlp:
        return width * (precision.itemsize + precision.operand)
    of_reference = 2 * precision.itemsize if precision.is_reference else 0
    return width * (2 * precision.itemsize + of_reference + precision.operand)


def _experts(shape: ModelShape, layout: Layout, precision: Precision, rows: float) -> float:
    """Activations as `_dense` counts them, for tokens spread evenly over all experts: a rank gets as many as it sends."""
    router = 4 * shape.experts + (1 + 4) * shape.experts + 36 * shape.top_k
    total = norm(shape.hidden, precision) + router + precision.itemsize * shape.hidden
    # Each of a token's copies is gathered to all ranks that share its expert.
    copies = shape.top_k * layout.etp
    width = shape.expert_ffn / layout.etp
    of_reference = width * precision.itemsize if precision.is_reference else 0  # before it is weighted
    if shape.biases and precision.is_reference:  # gpt-oss: the clamped gate, its sigmoid, and what comes out
        of_reference += (2 * width + shape.hidden) * precision.itemsize
    of_expert = precision.operand * (shape.expert_latent or shape.hidden) + _between(shape, width, precision)
    total += copies * (of_expert + of_reference + STATISTICS) + precision.operand * shape.expert_latent
    return rows * total + (_between(shape, shape.shared_ffn / layout.tp, precision) if shape.shared_ffn else 0)


def _experts_selected(shape: ModelShape, layout: Layout, precision: Precision, rows: float) -> float:
    """The second product's input of every copy of a token, and what the norm gives out."""
    copies, width = shape.top_k * layout.etp, shape.expert_ffn / layout.etp
    return rows * (copies * width * precision.operand + precision.itemsize * shape.hidden)
