"""The contents of an architecture's file: names, functions of a Hugging Face config, and what others make of the family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.models.fused_experts import FusedExperts
from megarl.models.fused_rows import FusedRows
from megarl.models.layer_ropes import LayerRope
from megarl.models.rope import rope_refusal
from megarl.models.vision import Vision
from megarl.models.weight_map import WeightMap

HFConfig = dict[str, Any]


@dataclass(frozen=True)
class SglangFacts:
    """Differences of SGLang's implementation of a family from its default."""

    replicates_attention: bool = False
    """Whether an engine can hold several replicas of the attention (SGLang's DP attention)."""
    copies_kv_heads: bool = True
    """Whether more ranks than KV heads can share the attention."""
    refusal: Callable[[HFConfig], str | None] = rope_refusal
    """Why SGLang cannot serve a model of this config, or cannot be given its weights; None: it can."""
    padded_heads: Callable[[HFConfig], int] = lambda hf_config: 0
    """Heads of the tower that its servers pad to a multiple of their ranks, between those that they are sent; 0: none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its servers, so that they hold weights where they are sent; `rollout.engine_args` wins."""


@dataclass(frozen=True)
class HubNames:
    """Names on the hub for an expert's gate, up and down projection, and the block that holds the experts."""

    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    block: str = "mlp"
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of names in transformers, and what the hub has in their place."""
    expert_bias: str = "gate.e_score_correction_bias"
    """Name in the block of the bias that picks experts; transformers' is the default."""
    transposed: bool = False
    """Whether transformers holds all experts of a layer transposed, as the hub stores them."""
    alternating: bool = False
    """Whether transformers holds all experts of a layer as the hub stores gpt-oss's (`FusedExperts.alternating`)."""
    ends: tuple[tuple[str, str], ...] = ()
    """Ends of names that transformers gives, and what they are on the hub."""


@dataclass(frozen=True)
class QueryScale:
    """Queries of `layers` (None: of all) are multiplied by 1 + beta · ln(1 + ⌊(p + shift) / span⌋), after they are rotated.

    p is the token's position in its sequence, from 0 on.
    """

    beta: float
    span: float
    shift: int = 0
    layers: frozenset[int] | None = None

    def is_in(self, layer: int) -> bool:
        """Return whether it scales the queries of a layer (global, zero-based)."""
        return self.layers is None or layer in self.layers


@dataclass(frozen=True)
class GateLimits:
    """With a limit L, SiLU of a gate is at most L, and what it multiplies between -L and L; infinite: they are not clamped."""

    mlp: float = math.inf
    """Of the MLP, and of the expert that all tokens share."""
    experts: float = math.inf
    """Of the others."""


@dataclass(frozen=True)
class ValueHeads:
    """Heads of values that are `width` wide, whatever those of keys are, and multiplied by `scale`."""

    width: int
    scale: float


class OwnLayers(Protocol):
    """Parts of layers that an option computes: its `decoder_layers.py` puts them into specs and finishes chunks."""

    @property
    def option(self) -> str:
        """The option's name."""

    @property
    def keyless(self) -> frozenset[int]:
        """The layers that keep no keys and values."""


@dataclass(frozen=True)
class DecoderTraits:
    """Traits of a family's decoder that megatron-core's layers do not have by themselves; the defaults are Llama's."""

    pre_norms: bool = True
    """Whether there is a norm before attention and one before the MLP."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normed before they are added to the residual stream."""
    projection_norms: bool = False
    """Whether `qk_layernorm` norms all heads of the queries together, and all of the keys, instead of each head."""
    norms_behind_rotary: bool = False
    """Whether `qk_layernorm` norms queries and keys after they are rotated, and not before."""
    corrected_softmax: float | None = None
    """The least sum that weights of experts are divided by, of a router that scores by a softmax and chooses with a correction
    bias, which megatron-core does after sigmoids only; None: the router is megatron-core's."""
    embedding_multiplier: float = 1.0
    """Factor of embeddings."""
    rounded_multiplier: bool = False
    """Whether that number is rounded to the model's dtype first."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP before they are added."""
    logits_divisor: float = 1.0
    """Divisor of logits, before a temperature."""
    of_variant: DecoderTraits | None = None
    """Norms and multiplier of the layers that have something in place of attention; None: as the others."""
    query_scale: QueryScale | None = None
    """How queries are scaled by their position; None: they are not."""
    chunks: bool = False
    """Whether windows do not slide: a token attends to those before it in its own chunk of its sequence."""
    unit_heads: bool = False
    """Whether heads of queries and keys that rotate are divided by their root mean square."""
    score_cap: float | None = None
    """A scaled attention score s is score_cap · tanh(s / score_cap), before tokens are hidden; None: s."""
    logits_cap: float | None = None
    """The same of logits, before a temperature."""
    mlp_alone: frozenset[int] = frozenset()
    """The layers, counted from 0, that are an MLP or a mixture alone, with no attention."""
    streams: int = 1
    """Residual streams that travel between layers one beside another."""
    attention_alone: frozenset[int] = frozenset()
    """The layers that are attention, or what stands in its place, alone, with no MLP."""
    head_gates: bool = False
    """Whether a sigmoid for each head, of a projection of the layer's input, multiplies what the head gives."""
    gate_limits: tuple[GateLimits, ...] = ()
    """How each layer's MLP and experts are clamped; empty: in no layer."""
    values: ValueHeads | None = None
    """Heads of values; None: as wide as those of keys, and multiplied by nothing."""
    sinks_in_windows: bool = False
    """Whether layers without a window have no sinks, though `softmax_type` gives layers some."""
    sublayers: int = 1
    """Attentions of a layer, each with a dense MLP behind it if there are several; experts are then beside the first MLP."""
    own_layers: OwnLayers | None = None
    """What an option's layers have that no others have."""


class LinearAttention(Protocol):
    """The attention that some layers have in place of the other, with a state for each sequence and no keys of every token."""

    @property
    def layers(self) -> frozenset[int]:
        """The layers, counted from 0, that have it."""

    @property
    def heads(self) -> int:
        """Heads that tensor and context parallelism together must divide."""

    def exchanged(self, tp: int, cp: int) -> int | None:
        """Numbers of a token that context ranks exchange in a layer's forward pass, on all tensor ranks together; those that
        all of them get count `cp` times. None: context ranks cannot share these layers out."""

    def products(self, hidden: int) -> int:
        """Multiply-adds per token of one layer of a decoder of width `hidden`."""

    def kept_bytes(self, tp: int, itemsize: int, operand: int, mean_length: float, *, plain: bool) -> float:
        """Bytes per token of sequences of `mean_length` that a layer on a rank of `tp` keeps for the backward pass, behind what
        its first projection reads; `operand` bytes is an element that a product reads, `plain`: on plain torch."""

    def state_bytes(self, itemsize: int) -> int:
        """Bytes that an engine keeps of a sequence for one layer."""


@dataclass(frozen=True)
class Architecture:
    """A model family. The functions take the dict of `config.json` and raise ModelError for what they cannot represent."""

    name: str
    """`model_type` in config.json."""
    hf_classes: tuple[str, ...]
    """What `architectures` in config.json may name: the causal LM, and the reward model with a scalar head, which transformers
    does not have of every family."""
    transformer_config_kwargs: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of TransformerConfig, with `activation` a name that the megatron room translates."""
    gpt_kwargs: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of GPTModel; `vocab_size` is without padding."""
    weight_map: Callable[[HFConfig], WeightMap]
    """Hugging Face tensors to Megatron parameters, both ways."""
    sglang: SglangFacts = field(default_factory=SglangFacts)
    hub: HubNames = field(default_factory=HubNames)
    text_config: Callable[[HFConfig], HFConfig] = lambda hf_config: hf_config
    """The decoder's part of the config, with the fields that text families read."""
    vision: Callable[[HFConfig], Vision | None] = lambda hf_config: None
    """The tower that a config describes; None of a family that only reads."""
    other_types: tuple[str, ...] = ()
    """Further values of `model_type`, of models whose config differs in that alone."""
    other_names: tuple[tuple[str, str], ...] = ()
    """Beginnings of names of tensors in folders that the hub does not have, and in those of the hub; the first one counts."""
    hub_name: Callable[[str], str] = lambda name: name
    """The hub's name of a tensor of transformers' module, where more of it than its beginning (`other_names`) differs."""
    fused_experts: Callable[[HFConfig], FusedExperts | FusedRows] | None = None
    """How the hub stores experts, where it does not store each one's tensors as the weight map calls them."""
    fused_rows: Callable[[HFConfig], FusedRows] | None = None
    """Which tensors the hub stores one below another, where the weight map calls each by a name of its own."""
    in_transformers: Callable[[HFConfig], FusedRows] | None = None
    """Which tensors transformers holds in one parameter, or under another name, where the hub has each."""
    traits: Callable[[HFConfig], DecoderTraits] = lambda hf_config: DecoderTraits()
    """Traits of the decoder beside megatron-core's own layers."""
    linear: Callable[[HFConfig], LinearAttention | None] = lambda hf_config: None
    """The linear attention of some of the layers; None: all attend to keys and values."""
    layer_rope: Callable[[HFConfig], LayerRope | None] = lambda hf_config: None
    """The layers that rotate otherwise than `text_config` says; None: all rotate as it says."""

    module: str | None = None
    """The file of megarl's that tells transformers of the family's model of text, where it has the layers alone."""
    followed: Callable[[HFConfig], Mapping[int, int]] = lambda hf_config: {}
    """By layer, the earlier one that must be in the same model chunk, because the layer reads what that one computes."""

    def rows_together(self, hf_config: HFConfig) -> FusedRows | None:
        """`fused_rows` of a model; None: the hub stores each tensor by itself."""
        return self.fused_rows(hf_config) if self.fused_rows is not None else None
