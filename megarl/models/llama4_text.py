"""Llama 4's text model: attention within chunks, layers without positions whose queries are scaled, experts by a sigmoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig, HubNames, QueryScale, SglangFacts
from megarl.models.fused_experts import FusedExperts
from megarl.models.hf_fields import positive, refuse, refuse_biases, size, with_defaults
from megarl.models.smollm3 import rotating_layers
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap

DEFAULTS = {
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "num_local_experts": 16, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "use_qk_norm": True, "attn_temperature_tuning": True,
    "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
"""transformers' defaults for fields that are missing."""
CHUNK = 8192
"""Its default of a field that may be null on purpose."""
CHUNKED, FULL = "chunked_attention", "full_attention"
BLOCK = "feed_forward."
SCOPE = "megarl has not compared its servers of this family with training"


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    filled = with_defaults(hf_config, DEFAULTS)
    chunk, listed = hf_config.get("attention_chunk_size", CHUNK), filled.get("no_rope_layers") or None
    return filled | {"attention_chunk_size": chunk, "no_rope_layers": listed}


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with neighbouring rotary pairs, chunks in place of windows, and experts.

    Raises ModelError for biases, several experts per token, layers that attend otherwise, or what the dense decoder refuses.
    """
    refuse_biases(hf_config)
    refuse(hf_config, "num_experts_per_tok", 1, "megatron-core multiplies an expert's inputs by its score for a single one")
    has_unit_heads = traits(hf_config).unit_heads
    experts, rotates = _experts(hf_config), rotating_layers(hf_config)
    window = {"sliding_window": hf_config["attention_chunk_size"], "layer_types": None}
    return (
        dense.transformer_config_kwargs(hf_config | window, sizes, _chunked(hf_config, rotates))
        | {"rotary_interleaved": True, "no_rope_freq": [int(not here) for here in rotates], "qk_l2_norm": has_unit_heads}
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | {"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True}
    )


def _chunked(hf_config: HFConfig, rotates: list[bool]) -> frozenset[int]:
    kinds = hf_config.get("layer_types") or [CHUNKED if here else FULL for here in rotates]
    if len(kinds) != len(rotates) or any(kind not in (CHUNKED, FULL) for kind in kinds):
        raise ModelError(
            f"config.json: layer_types is {kinds!r:.80}; it must say {CHUNKED!r} or {FULL!r} for {len(rotates)} layers"
        )
    if CHUNKED in kinds:
        size(hf_config, "attention_chunk_size")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == CHUNKED)


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    layers, step = size(hf_config, "num_hidden_layers"), size(hf_config, "interleave_moe_layer_step")
    listed = hf_config.get("moe_layers")
    return moe.MoeSizes.from_hf(
        hf_config,
        range(step - 1, layers, step) if listed is None else listed,
        experts_fields=("num_local_experts",),
        ffn_field="intermediate_size",
        shared_experts=1,
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules under the names of this family, with a shared expert in every layer that has experts."""
    experts = _experts(hf_config)
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, hf_block=BLOCK, hf_router="router", hf_shared="shared_expert.")
    return moe.weight_map(sizes, experts, dense.attention_rules(sizes), of_experts, hf_block=BLOCK)


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Chunks, heads of one length where they rotate, a scale of queries where not. Raises ModelError if it is no number."""
    filled = text_config(hf_config)
    scale = None
    if filled["attn_temperature_tuning"]:
        layers = frozenset(layer for layer, here in enumerate(rotating_layers(filled)) if not here)
        scale = QueryScale(positive(filled, "attn_scale"), positive(filled, "floor_scale"), shift=1, layers=layers)
    return DecoderTraits(chunks=True, unit_heads=bool(filled["use_qk_norm"]), query_scale=scale)


def fused_experts(hf_config: HFConfig) -> FusedExperts:
    """The sizes of the experts that the hub stores together."""
    experts = _experts(filled := text_config(hf_config))
    return FusedExperts(experts.num_experts, size(filled, "hidden_size"), experts.expert_ffn_size)


def _sizes(hf_config: HFConfig) -> dense.DenseSizes:
    return replace(dense.DenseSizes.from_hf(hf_config), ffn_size=size(hf_config, "intermediate_size_mlp"))


ARCHITECTURE = text_family(
    "llama4_text",
    ("Llama4ForCausalLM", "Llama4ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    sizes_of=_sizes,
    sglang=SglangFacts(refusal=lambda hf_config: SCOPE),
    traits=traits,
    fused_experts=fused_experts,
    hub=HubNames(transposed=True),
)
