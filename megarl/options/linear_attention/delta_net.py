"""Decoders of which some layers have a gated delta net in place of attention: sizes, arguments, rules.

What Qwen3-Next and Qwen3.5 share besides: norms whose weights are stored less one, attention that a part of q gates, norms of
every q and k head, and a quarter of a head that rotates. The layer is `layer.py`, the families are in `families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.errors import ModelError
from megarl.models import dense
from megarl.models.dense import HF_LAYER, LAYER
from megarl.models.hf_fields import refuse, refuse_biases, size, with_defaults
from megarl.models.packings import Copy, HeadSection, Packing, Sections
from megarl.models.weight_map import Rule

LINEAR, FULL = "linear_attention", "full_attention"
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
"""Names of the convolutions of families whose hub has one for queries, one for keys and one for values."""
CHUNK = 64
"""Tokens that are computed together, by `delta_rule.py` and by flash-linear-attention."""
BLOCK = 8
"""Tokens of a chunk whose pairs have all their channels' decays computed; pairs of two blocks share those to a block."""
DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""transformers' defaults that differ from those of other families."""


def text_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config with what transformers gives fields that are missing."""
    return with_defaults(hf_config, DEFAULTS)


@dataclass(frozen=True)
class DeltaSizes:
    """The `layers` with linear attention: `keys` key heads of width `key_dim`, and `values` value heads of `value_dim`.

    A key head is read by values / keys value heads. The convolution sees `width` tokens. Of the difference to a value at most
    `most_written` is written. `norm_epsilon` is that of the norm of what is read, None: that of the model's other norms. The
    core asks what `models.architecture.LinearAttention` says.
    """

    layers: frozenset[int]
    keys: int
    values: int
    key_dim: int
    value_dim: int
    width: int
    most_written: float = 1.0
    norm_epsilon: float | None = None
    by_channel: ClassVar[bool] = False
    """Whether each channel of the keys has a decay of its own."""

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any]) -> DeltaSizes:
        """Read a config with its defaults.

        Raises:
            ModelError: a field is missing, no positive integer, or contradicts another.
        """
        keys, values = size(hf_config, "linear_num_key_heads"), size(hf_config, "linear_num_value_heads")
        if values % keys:
            raise ModelError(f"config.json: linear_num_key_heads is {keys}; it must divide linear_num_value_heads={values}")
        return cls(
            layers=frozenset(number for number, kind in enumerate(layer_types(hf_config)) if kind == LINEAR),
            keys=keys,
            values=values,
            key_dim=size(hf_config, "linear_key_head_dim"),
            value_dim=size(hf_config, "linear_value_head_dim"),
            width=size(hf_config, "linear_conv_kernel_dim"),
        )

    @property
    def heads(self) -> int:
        """The key heads: a tensor rank has whole ones, and the value heads that read with them."""
        return self.keys

    def exchanged(self, tp: int, cp: int) -> int:
        """The convolution's inputs, write strengths and decays, and what is read."""
        return self.channels + 2 * self.values + self.values_width

    def products(self, hidden: int) -> int:
        """Multiply-adds per token of one layer: projections, convolution, and a state that is read with the key, written to,
        and read with the query, as generation does it; chunks compute more."""
        projected = self.channels + self.values_width + 2 * self.values
        states = 3 * self.values * self.key_dim * self.value_dim
        return hidden * (projected + self.values_width) + self.channels * self.width + states

    def kept_bytes(self, tp: int, itemsize: int, operand: int, mean_length: float, *, plain: bool) -> float:
        """Bytes per token that a layer keeps between the input of its first projection and the output of its last.

        On a rank of `tp`; `operand` bytes is an element that a matrix product reads. `plain`: by `plain_rule`, else by
        flash-linear-attention.
        """
        heads, values, channels = self.values / tp, self.values_width / tp, self.channels / tp
        keys, chunk = heads * self.key_dim, min(CHUNK, mean_length)
        total = itemsize * channels * (self.width + 1)  # the convolution's inputs, each token's once for every tap, and SiLU's
        total += 4 * 2 * (self.keys_width / tp + values) + itemsize * 2 * values  # unit lengths; the norm, and its gate
        total += values * operand  # the output projection's input
        if plain:  # pairs within a chunk six times; keys, queries and values as they are scaled, solved and read
            return total + 4 * (6 * heads * chunk + 10 * keys + 5 * values)
        return total + itemsize * (3 * keys + 2 * values) + 4 * heads * (chunk / 2 + 2)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes that an engine keeps of a sequence for a layer: states in float32, and the convolution's last inputs."""
        return 4 * self.values * self.key_dim * self.value_dim + (self.width - 1) * self.channels * itemsize

    @property
    def channels(self) -> int:
        """Channels of the convolution for a token: queries, keys and values."""
        return 2 * self.keys_width + self.values_width

    @property
    def keys_width(self) -> int:
        """Width of all keys, and of all queries."""
        return self.keys * self.key_dim

    @property
    def values_width(self) -> int:
        """Width of all values, and of their gates."""
        return self.values * self.value_dim


def linear_attention(hf_config: dict[str, Any]) -> DeltaSizes:
    """The sizes of a family's config, for `Architecture.linear`."""
    return DeltaSizes.from_hf(text_config(hf_config))


def layer_types(hf_config: dict[str, Any]) -> list[str]:
    """Each layer's kind of attention.

    Raises:
        ModelError: a kind is unknown, or there are more or fewer of them than layers.
    """
    layers, interval = size(hf_config, "num_hidden_layers"), size(hf_config, "full_attention_interval", default=4)
    kinds = hf_config.get("layer_types") or [FULL if (number + 1) % interval == 0 else LINEAR for number in range(layers)]
    if len(kinds) != layers:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries; it must have num_hidden_layers={layers} of them")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise ModelError(f"config.json: layer_types names {kind!r}; its entries must be '{LINEAR}' or '{FULL}'")
    return list(kinds)


def transformer_config_kwargs(hf_config: dict[str, Any], sizes: dense.DenseSizes, delta: DeltaSizes) -> dict[str, Any]:
    """The dense decoder's arguments, with linear attention in some layers and a gate on the attention of the others.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    refuse(hf_config, "attn_output_gate", True, "these families are built with a gate on attention")
    refuse(hf_config, "output_gate_type", "silu", "the output of linear attention is gated by SiLU")
    return (
        dense.transformer_config_kwargs({**hf_config, "layer_types": None}, sizes)
        | linear_kwargs(delta, sizes.num_layers)
        | {"qk_layernorm": True, "layernorm_zero_centered_gamma": True, "attention_output_gate": True}
    )


def linear_kwargs(delta: DeltaSizes, num_layers: int) -> dict[str, Any]:
    """The arguments for linear attention in some of the layers."""
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer in delta.layers) for layer in range(num_layers)],
        "linear_conv_kernel_dim": delta.width,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.keys,
        "linear_num_value_heads": delta.values,
    }


def interleaved_projection(hidden_size: int, delta: DeltaSizes) -> tuple[tuple[str, ...], Sections]:
    """Qwen3-Next's tensors of the input projection: for each key head its q, k, v and gates, and its write strengths and
    decays."""
    wide, heads = delta.values // delta.keys * delta.value_dim, delta.values // delta.keys
    first, of_key = 0, 2 * delta.key_dim + 2 * wide
    sections = []
    for name, rows in (("query", delta.key_dim), ("key", delta.key_dim), ("value", wide), ("z", wide)):
        sections.append(HeadSection(name, 0, first, rows, of_key))
        first += rows
    sections += [HeadSection("beta", 1, 0, heads, 2 * heads), HeadSection("alpha", 1, heads, heads, 2 * heads)]
    shapes = ((of_key * delta.keys, hidden_size), (2 * delta.values, hidden_size))
    return ("in_proj_qkvz", "in_proj_ba"), Sections(shapes, delta.keys, tuple(sections))


def separate_projections(hidden_size: int, delta: DeltaSizes) -> tuple[tuple[str, ...], Sections]:
    """Qwen3.5's tensors of the input projection: q, k and v of all heads; gates; write strengths; decays."""
    heads = delta.values // delta.keys
    of_others = ((delta.values_width, heads * delta.value_dim), (delta.values, heads), (delta.values, heads))
    sections = list(_channels(delta))
    for number, (name, (_, rows)) in enumerate(zip(("z", "beta", "alpha"), of_others, strict=True), start=1):
        sections.append(HeadSection(name, number, 0, rows, rows))
    rows_of_parts = (delta.channels, *(rows for rows, _ in of_others))
    shapes = tuple((rows, hidden_size) for rows in rows_of_parts)
    return ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), Sections(shapes, delta.keys, tuple(sections))


def each_by_itself(delta: DeltaSizes, rows: Mapping[str, int], *rest: int) -> Sections:
    """A tensor for each of the sections, which have so many `rows` in all; `rest` are their shapes behind that."""
    parts = enumerate(rows.items())
    sections = tuple(HeadSection(name, n, 0, count // delta.keys, count // delta.keys) for n, (name, count) in parts)
    return Sections(tuple((count, *rest) for count in rows.values()), delta.keys, sections)


def channel_rows(delta: DeltaSizes) -> dict[str, int]:
    """The rows of all queries, keys and values, in the convolution as in the projection before it."""
    return {"query": delta.keys_width, "key": delta.keys_width, "value": delta.values_width}


def attention_rules(sizes: dense.DenseSizes, delta: DeltaSizes, projection: tuple[Sequence[str], Sections]) -> list[Rule]:
    """Linear attention and, in the other layers, gated attention; `projection` is one of the two above."""
    gated = gated_attention_rules(sizes, frozenset(range(sizes.num_layers)) - delta.layers)
    return [input_norm_rule(sizes, delta), *linear_rules(sizes, delta, projection), *decay_rules(delta), *gated]


def gated_attention_rules(sizes: dense.DenseSizes, layers: frozenset[int] | None = None) -> list[Rule]:
    """Gated attention in `layers`, None for all."""
    return dense.attention_rules(sizes, head_norms=True, gated=True, layers=layers)


def input_norm_rule(sizes: dense.DenseSizes, delta: DeltaSizes) -> Rule:
    """The norm before linear attention."""
    fused = LAYER + "self_attention.in_proj.layer_norm_weight"
    return dense.input_norm_rule(sizes.hidden_size, te_name=fused, layers=delta.layers)


def linear_rules(
    sizes: dense.DenseSizes,
    delta: DeltaSizes,
    projection: tuple[Sequence[str], Sections],
    *,
    block: str = "linear_attn.",
    convolutions: tuple[Sequence[str], Sections] | None = None,
    norm: str = "norm",
    output: str = "out_proj",
) -> list[Rule]:
    """Linear attention but for what its decays depend on; `projection` are names of tensors and how they are laid out.

    `block`, `norm` and `output` are what the hub calls the attention, the norm of what is read and the last projection;
    `convolutions` as `projection`, None: one tensor of all channels.
    """
    prefix, hf = LAYER + "self_attention.", HF_LAYER + block
    one = Sections(((delta.channels, 1, delta.width),), delta.keys, _channels(delta))

    def rule(name: str, hf_names: Sequence[str], packing: Packing) -> Rule:
        return Rule(f"{prefix}{name}.weight", tuple(f"{hf}{each}.weight" for each in hf_names), packing, layers=delta.layers)

    return [
        rule("in_proj", *projection),
        rule("conv1d", *(convolutions or (("conv1d",), one))),
        rule("out_norm", (norm,), Copy((delta.value_dim,))),
        rule("out_proj", (output,), Copy((sizes.hidden_size, delta.values_width), axis=1)),
    ]


def decay_rules(delta: DeltaSizes, block: str = "linear_attn.") -> list[Rule]:
    """What the decays of the value heads depend on beside a token."""
    return [
        Rule(f"{LAYER}self_attention.{name}", (HF_LAYER + block + name,), Copy((delta.values,), axis=0), layers=delta.layers)
        for name in ("dt_bias", "A_log")
    ]


def _channels(delta: DeltaSizes) -> tuple[HeadSection, ...]:
    """q, k and v of all heads, one after the other."""
    wide = delta.values // delta.keys * delta.value_dim
    return (
        HeadSection("query", 0, 0, delta.key_dim, delta.key_dim),
        HeadSection("key", 0, delta.keys_width, delta.key_dim, delta.key_dim),
        HeadSection("value", 0, 2 * delta.keys_width, wide, wide),
    )
