"""The sizes of a model that memory and time follow from, read from its Hugging Face config."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megarl.models.adapters import AdapterSpec
from megarl.models.architecture import DecoderTraits, LinearAttention
from megarl.models.layer_ropes import LayerRope
from megarl.models.registry import architecture_for, load_hf_config
from megarl.models.rope import exact_positions
from megarl.models.vision import Vision
from megarl.models.weight_map import WeightMap


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek): widths of the latents and of a head's parts. `query` None: no latent."""

    query: int | None
    key_value: int
    nope: int
    rope: int


@dataclass(frozen=True)
class IndexerShape:
    """So many `layers` have an indexer of `heads` of width `head_dim`; in all a token attends to `top_k` keys at most."""

    layers: int
    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A decoder's sizes. `query` and `key_value` are the widths of all heads' queries and of their keys or values.

    `expert_layers` have `experts` of width `expert_ffn`, of which a token uses `top_k`, and a shared one of `shared_ffn`.
    `window_layers` are those whose tokens attend through a window of `window` tokens. `exact_positions` are the tokens of a
    sequence beyond which its rotary frequencies depend on its length, and the field that says so. `biases`: all projections
    have biases. `vision` is the tower in front of it, if it has one; `traits` are what its layers have beside megatron-core's.
    `indexer` chooses the keys that tokens attend to; None: they attend to all.
    `linear` is the linear attention that some layers have in place of the other; `gated`: a part of the query projection gates
    attention. `sinks`: a score of its own for each head is among those that a token attends by. `predicts`: it has a layer for
    multi-token prediction behind its `layers`. `lora`: its adapters, which alone are trained (`with_lora`). `gated_mlp`: MLPs
    and experts have a gate. `expert_latent`: width of what experts work in, 0 if that is the residual stream. `other_heads`:
    the layers that have other heads than these, and which; None: there are none.
    """

    config: dict[str, Any]
    weight_map: WeightMap
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    ffn: int
    vocab: int
    head_norms: bool
    latent: Latent | None
    experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    expert_layers: frozenset[int]
    window: int = 0
    window_layers: frozenset[int] = frozenset()
    exact_positions: tuple[int, str] | None = None
    biases: bool = False
    vision: Vision | None = None
    traits: DecoderTraits = field(default_factory=DecoderTraits)
    linear: LinearAttention | None = None
    indexer: IndexerShape | None = None
    gated: bool = False
    sinks: bool = False
    predicts: bool = False
    lora: AdapterSpec | None = None
    gated_mlp: bool = True
    expert_latent: int = 0
    other_heads: LayerRope | None = None

    @cached_property
    def with_prediction(self) -> ModelShape:
        """The same model with the layer for multi-token prediction, which must be one that a folder of it may have."""
        return replace(self, weight_map=self.weight_map.with_prediction(), predicts=True)

    def with_lora(self, lora: AdapterSpec | None, field: str = "policy.lora") -> ModelShape:
        """The same model with adapters, which alone are trained, in its weight map; None: without.

        Raises:
            ConfigError: as `AdapterSpec.with_adapters`, about the section at `field`.
        """
        if lora is None:
            return self
        rows = architecture_for(self.config).rows_together(self.config)
        return replace(self, weight_map=lora.with_adapters(self.weight_map, rows, field), lora=lora)

    @property
    def attention_layers(self) -> int:
        """Attentions that keep keys and values, or latents, of every token."""
        with_linear = len(self.linear.layers) if self.linear else 0
        return self.traits.sublayers * (self.layers - len(self.traits.mlp_alone) - with_linear)

    @property
    def dense_layers(self) -> int:
        """MLPs in place of experts, or beside them."""
        if self.traits.sublayers > 1:
            return self.traits.sublayers * self.layers
        return self.layers - len(self.traits.attention_alone) - len(self.expert_layers)

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP or an expert."""
        return 3 if self.gated_mlp else 2

    def attended(self, context: float) -> float:
        """Number of tokens that one with `context` tokens, itself included, attends to: the mean over the layers."""
        if self.indexer is not None:
            return min(context, self.indexer.top_k)
        share = len(self.window_layers) / self.layers
        return context if not share else (1 - share) * context + share * min(context, self.window)

    @cached_property
    def by_heads(self) -> tuple[tuple[ModelShape, frozenset[int]], ...]:
        """The model with the heads of each kind of its layers, and the layers that have them."""
        layers = frozenset(range(self.layers))
        if self.other_heads is None or (heads := self.other_heads.heads) is None:
            return ((self, layers),)
        base, width = replace(self, other_heads=None, sinks=self.sinks and not self.traits.sinks_in_windows), heads.head_dim
        value = width if self.traits.values is None else self.value_dim
        other = replace(
            base, heads=heads.num_heads, kv_heads=heads.num_groups, head_dim=width, value_dim=value, sinks=self.sinks
        )
        return (base, layers - self.other_heads.layers), (other, self.other_heads.layers)

    def kv_width(self, tp: int) -> float:
        """Numbers that an engine's rank keeps of a token in all layers with grouped attention: at least a KV head in each."""
        keyless = self.traits.own_layers.keyless if self.traits.own_layers is not None else frozenset()
        attending = self.attention_layers / self.layers  # of any kind
        kinds = ((max(kind.kv_heads / tp, 1) * kind.of_kv_head, layers - keyless) for kind, layers in self.by_heads)
        return attending * sum(width * len(layers) for width, layers in kinds)

    @property
    def query(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all heads' keys, as they are kept: one head for a group of queries."""
        return self.kv_heads * self.head_dim

    @property
    def of_kv_head(self) -> int:
        """Numbers that are kept of a token for a KV head: its key, and its value."""
        return self.head_dim + self.value_dim

    @property
    def attention_width(self) -> int:
        """Width of what all heads give together, which the output projection takes."""
        return self.heads * self.value_dim

    @property
    def divided_ffn(self) -> int | None:
        """Widths that tensor parallelism must divide of the feed-forward layers outside experts: the dense layers' width and
        that of the shared experts. None: there are neither."""
        widths = [self.ffn] if self.dense_layers else []
        widths += [self.shared_ffn] if self.shared_ffn else []
        return math.gcd(*widths) if widths else None

    @property
    def layout_sizes(self) -> dict[str, Any]:
        """Arguments of `Layout.check_model`."""
        return {
            "num_layers": self.layers,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "ffn_size": self.divided_ffn,
            "num_experts": self.experts or None,
            "expert_ffn_size": self.expert_ffn or None,
            "deepstack": len(self.vision.deepstack) if self.vision else 0,
            "linear_heads": self.linear.heads if self.linear else None,
            "linear_exchanges": self.linear is None or self.linear.exchanged(1, 1) is not None,
        }

    @property
    def cached(self) -> int:
        """Numbers that one layer's KV cache has for a token, on all ranks together but for replicas."""
        of_indexers = self.indexer.head_dim * self.indexer.layers // self.layers if self.indexer else 0
        return of_indexers + (self.latent.key_value + self.latent.rope if self.latent else self.kv_heads * self.of_kv_head)

    @classmethod
    def read(cls, folder: str | Path, *, predicts: bool = False) -> ModelShape:
        """The model of a Hugging Face folder; `config.json` is all that is read. `predicts`: with the layer for multi-token
        prediction.

        Raises:
            ModelError: the config is missing, of an unknown architecture, or contradicts itself.
        """
        shape = _read(str(Path(folder).absolute()))
        return shape.with_prediction if predicts else shape


@cache
def _read(folder: str) -> ModelShape:
    return shape_of({key: value for key, value in load_hf_config(folder).items() if key != "quantization_config"})


def shape_of(hf_config: dict[str, Any]) -> ModelShape:
    """The shape of a Hugging Face config, whose weights may not be quantised."""
    architecture = architecture_for(hf_config)
    sizes = architecture.transformer_config_kwargs(hf_config)
    layers, heads = sizes["num_layers"], sizes["num_attention_heads"]
    latent, head_dim = None, sizes["kv_channels"]
    if sizes.get("multi_latent_attention"):
        latent = Latent(sizes["q_lora_rank"], sizes["kv_lora_rank"], sizes["qk_head_dim"], sizes["qk_pos_emb_head_dim"])
        head_dim = latent.nope + latent.rope
    frequency = sizes.get("moe_layer_freq", 1)
    has_experts = [bool(n) for n in frequency] if isinstance(frequency, list) else [True] * layers
    experts = sizes.get("num_moe_experts") or 0
    weight_map, traits = architecture.weight_map(hf_config), architecture.traits(hf_config)
    return ModelShape(
        config=hf_config,
        weight_map=weight_map,
        layers=layers,
        hidden=sizes["hidden_size"],
        heads=heads,
        kv_heads=heads if latent else sizes["num_query_groups"],
        head_dim=head_dim,
        value_dim=sizes["v_head_dim"] if latent else traits.values.width if traits.values is not None else head_dim,
        ffn=sizes["ffn_hidden_size"],
        vocab=int(architecture.gpt_kwargs(hf_config)["vocab_size"]),
        head_norms=bool(sizes["qk_layernorm"]) and latent is None,
        latent=latent,
        experts=experts,
        top_k=sizes.get("moe_router_topk") or 0,
        expert_ffn=sizes.get("moe_ffn_hidden_size") or 0,
        shared_ffn=sizes.get("moe_shared_expert_intermediate_size") or 0,
        expert_layers=frozenset(n for n in range(layers) if experts and has_experts[n]),
        window=sizes["window_size"][0] + 1 if "window_size" in sizes else 0,
        window_layers=_window_layers(sizes, layers),
        biases=bool(sizes["add_bias_linear"]),
        exact_positions=None if latent else exact_positions(architecture.text_config(hf_config)),
        vision=architecture.vision(hf_config),
        traits=traits,
        linear=architecture.linear(hf_config),
        indexer=_indexer(sizes, weight_map),
        gated=bool(sizes.get("attention_output_gate")),
        sinks=sizes.get("softmax_type") == "learnable",
        gated_mlp=bool(sizes["gated_linear_unit"]),
        expert_latent=sizes.get("moe_latent_size") or 0,
        other_heads=rope if (rope := architecture.layer_rope(hf_config)) is not None and rope.heads is not None else None,
    )


def _indexer(sizes: dict[str, Any], weight_map: WeightMap) -> IndexerShape | None:
    if "dsa_indexer_topk" not in sizes:
        return None
    rule = next(rule for rule in weight_map.rules if rule.megatron_name.endswith(".indexer.linear_wk.weight"))
    layers = sum(map(rule.has_layer, range(sizes["num_layers"])))
    return IndexerShape(layers, *(sizes[f"dsa_indexer_{name}"] for name in ("n_heads", "head_dim", "topk")))


def _window_layers(sizes: dict[str, Any], layers: int) -> frozenset[int]:
    if "window_size" not in sizes:
        return frozenset()
    of_layers = sizes["window_attn_skip_freq"]
    return frozenset(n for n in range(layers) if of_layers is None or of_layers[n])
