"""Decoders of which some layers have a Mamba-2 layer in place of attention: sizes, arguments, rules.

The layer is `layer.py`, its scan `scan.py`, the families are in `families.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.errors import ModelError
from megarl.models.dense import LAYER
from megarl.models.packings import Copy, HeadSection, Sections
from megarl.models.weight_map import Rule

CHUNK = 64
"""Tokens that `scan.py` computes together."""
MAMBA, ATTENTION = "linear_attention", "full_attention"
"""Kinds of layers, as transformers 5 calls them."""
OLD_KINDS = {"mamba": MAMBA, "attention": ATTENTION}
"""Names of the same in configs of earlier versions."""


@dataclass(frozen=True)
class MambaSizes:
    """The `layers` with a state space: `num_heads` of width `head_dim`, in `groups` with the same B and C of `state` each.

    The convolution sees `width` tokens, and has a bias if `conv_bias`. The output is normed in `norm_groups` of heads. Steps
    are clamped to `steps`. The core asks what `models.architecture.LinearAttention` says.
    """

    layers: frozenset[int]
    num_heads: int
    head_dim: int
    groups: int
    state: int
    width: int
    conv_bias: bool
    norm_groups: int
    steps: tuple[float, float]

    def __post_init__(self) -> None:
        if self.num_heads % self.groups:
            raise ModelError(
                f"config.json: a state space has {self.groups} groups of {self.num_heads} heads; the number of groups must "
                "divide that of the heads"
            )

    @property
    def inner(self) -> int:
        """Width of all heads, and of their gates."""
        return self.num_heads * self.head_dim

    @property
    def shared(self) -> int:
        """Width of all groups' B, and of their C."""
        return self.groups * self.state

    @property
    def channels(self) -> int:
        """Channels of the convolution for a token: inputs, B and C."""
        return self.inner + 2 * self.shared

    @property
    def heads(self) -> int:
        """A number that all ranks must divide: each has whole heads, and each tensor rank as many rows of B and C."""
        return math.gcd(self.num_heads, self.shared)

    def splits_groups(self, ranks: int) -> bool:
        """Return whether each of `ranks` that share out the heads has whole groups, and so none that another one reads."""
        return self.groups % ranks == 0

    def exchanged(self, tp: int, cp: int) -> int:
        """Inputs, steps, what is read, B and C, of which each context rank gets all where groups are not split."""
        return 2 * self.inner + self.num_heads + 2 * self.shared * (1 if self.splits_groups(tp * cp) else cp)

    def products(self, hidden: int) -> int:
        """Multiply-adds per token of one layer: projections, convolution, and a state that is written to and read, as
        generation does it; chunks compute more."""
        projected = self.inner + self.channels + self.num_heads
        return hidden * (projected + self.inner) + self.channels * self.width + 2 * self.inner * self.state

    def kept_bytes(self, tp: int, itemsize: int, operand: int, mean_length: float, *, plain: bool) -> float:
        """Bytes per token that a layer keeps between the input of its first projection and the output of its last.

        On a rank of `tp`; `operand` bytes is an element that a matrix product reads. `plain`: there are no other layers.
        """
        heads, inner, shared = self.num_heads / tp, self.inner / tp, self.shared
        chunk = min(CHUNK, mean_length)
        total = itemsize * 2 * self.channels / tp  # inputs of the convolution, and of SiLU
        total += itemsize * (self.inner + self.channels + self.num_heads) / tp  # gates, with all that was projected
        total += 4 * 4 * inner  # what is gated, its gate, the norm before and after its scale
        total += inner * operand  # the output projection's input
        pairs = heads * chunk * 2 + self.groups * chunk  # within a chunk: decays, scores by decay, scores
        states = inner * self.state / chunk * 2  # before each chunk, twice
        return total + 4 * (pairs + states + 5 * inner + 4 * shared + 6 * heads)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes that an engine keeps of a sequence for a layer: states in float32, and the convolution's last inputs."""
        return 4 * self.inner * self.state + (self.width - 1) * self.channels * itemsize


def step_limits(value: Any, field: str) -> tuple[float, float]:
    """Least and greatest step of a config field, no limits where it is null.

    Raises:
        ModelError: it is no pair of numbers, the first of which is at least 0 and less than the second.
    """
    if value is None:
        return 0.0, math.inf
    pair = [_number(v) for v in value] if isinstance(value, (list, tuple)) else []
    if len(pair) != 2 or not 0 <= pair[0] < pair[1]:
        raise ModelError(f"config.json: {field} is {value!r}; it must be two numbers, the first at least 0 and the smaller one")
    return pair[0], pair[1]


def _number(value: Any) -> float:
    """A number as JSON has it, or as transformers 5 writes what JSON lacks, `{"__float__": "Infinity"}`; else no number."""
    if isinstance(value, dict):
        value = math.inf if value == {"__float__": "Infinity"} else math.nan
    return float(value) if isinstance(value, (int, float)) else math.nan


def layer_kinds(hf_config: dict[str, Any], field: str, kinds: Sequence[str]) -> list[str]:
    """Each layer's kind, by a list in `field`, which may have the names of earlier versions.

    Raises:
        ModelError: it is no list, or names a kind that is none of `kinds`.
    """
    listed = hf_config.get(field)
    if not isinstance(listed, list) or not listed:
        raise ModelError(f"config.json: {field} is {listed!r}; it must be a list of each layer's kind")
    found = [OLD_KINDS.get(str(kind), str(kind)) for kind in listed]
    for kind in found:
        if kind not in kinds:
            raise ModelError(f"config.json: {field} names {kind!r}; its entries must be {' or '.join(map(repr, kinds))}")
    return found


def transformer_config_kwargs(mamba: MambaSizes, num_layers: int) -> dict[str, Any]:
    """megatron-core's arguments for state spaces in some layers; sizes travel to the layers beside them."""
    return {
        "experimental_attention_variant": "mamba2",
        "linear_attention_freq": [int(layer in mamba.layers) for layer in range(num_layers)],
        "linear_conv_kernel_dim": mamba.width,
    }


def mamba_rules(hidden: int, mamba: MambaSizes, hf: str, hf_norm: str) -> list[Rule]:
    """The layers' norm and state space; `hf` is what the hub calls the latter, up to the last dot, and `hf_norm` the norm."""
    prefix, layers = LAYER + "self_attention.", mamba.layers
    rows = mamba.inner + mamba.channels + mamba.num_heads

    def rule(name: str, hf_name: str, packing: Any) -> Rule:
        return Rule(prefix + name, (hf + hf_name,), packing, layers=layers)

    def per_head(name: str) -> Rule:
        return rule(name, name, Copy((mamba.num_heads,), axis=0))

    biases = [rule("conv1d.bias", "conv1d.bias", _channels(mamba, (mamba.channels,)))] if mamba.conv_bias else []
    return [
        Rule(
            LAYER + "input_layernorm.weight",
            (hf_norm,),
            Copy((hidden,)),
            layers=layers,
            te_name=prefix + "in_proj.layer_norm_weight",
        ),
        rule("in_proj.weight", "in_proj.weight", _projection(mamba, (rows, hidden))),
        rule("conv1d.weight", "conv1d.weight", _channels(mamba, (mamba.channels, 1, mamba.width))),
        *biases,
        per_head("dt_bias"),
        per_head("A_log"),
        per_head("D"),
        rule("norm.weight", "norm.weight", Copy((mamba.inner,), axis=0)),
        rule("out_proj.weight", "out_proj.weight", Copy((hidden, mamba.inner), axis=1)),
    ]


def _projection(mamba: MambaSizes, shape: tuple[int, ...]) -> Sections:
    """Rows of the input projection: gates, then the convolution's channels, then steps."""
    inner, steps = mamba.inner, mamba.inner + mamba.channels
    sections = (
        HeadSection("z", 0, 0, mamba.head_dim, mamba.head_dim),
        *_channel_sections(mamba, first=inner),
        HeadSection("dt", 0, steps, 1, 1),
    )
    return Sections((shape,), mamba.num_heads, sections)


def _channels(mamba: MambaSizes, shape: tuple[int, ...]) -> Sections:
    return Sections((shape,), mamba.num_heads, _channel_sections(mamba, first=0))


def _channel_sections(mamba: MambaSizes, first: int) -> tuple[HeadSection, ...]:
    """Inputs of all heads, B of all groups, C of all groups; a rank has a share of the rows of the last two."""
    of_writes = first + mamba.inner
    return (
        HeadSection("x", 0, first, mamba.head_dim, mamba.head_dim),
        HeadSection("B", 0, of_writes, 1, 1, units=mamba.shared),
        HeadSection("C", 0, of_writes + mamba.shared, 1, 1, units=mamba.shared),
    )
