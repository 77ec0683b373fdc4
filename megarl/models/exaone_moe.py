"""K-Exaone: Qwen3's attention, without positions in layers without a window, and DeepSeek-V3's experts behind dense layers."""

from __future__ import annotations

from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import HFConfig, HubNames, SglangFacts
from megarl.models.exaone4 import attention_kwargs, theta_refusal
from megarl.models.exaone4 import text_config as with_layer_types
from megarl.models.hf_fields import size
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
"""transformers' defaults that differ from those of other families."""
HUB_BIAS = "e_score_correction_bias"


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return with_layer_types(hf_config, DEFAULTS)


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Exaone 4's attention behind a norm, and experts.

    Raises:
        ModelError: another router than DeepSeek-V3's, layers that are neither dense nor have experts, or anything that Exaone 4
            refuses.
    """
    experts = _experts(hf_config)
    return (
        attention_kwargs(hf_config, sizes)
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.sigmoid_router_kwargs(hf_config, experts)
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules with norms of heads, dense layers, and experts with their bias and the shared ones.

    Layers for multi-token prediction are carried as they are.
    """
    experts = _experts(hf_config)
    attention = dense.attention_rules(sizes, head_norms=True)
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, expert_bias=True, hf_expert_bias=HUB_BIAS)
    return moe.weight_map(sizes, experts, attention, of_experts, left_out=("mtp.",))


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    return moe.MoeSizes.from_hf(
        hf_config,
        moe.listed_layers(hf_config, size(hf_config, "first_k_dense_replace", least=0)),
        experts_fields=("num_experts",),
        ffn_field="moe_intermediate_size",
        shared_experts=size(hf_config, "num_shared_experts"),
    )


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if "window_size" in attention_kwargs(filled := text_config(hf_config), dense.DenseSizes.from_hf(filled)):
        return "its windows are a token longer in this family"
    if "is_moe_layer" not in hf_config:
        return "its config.json must say is_moe_layer, as published ones do: SGLang finds experts by it"
    return moe.tied_refusal(hf_config) or theta_refusal(hf_config)


ARCHITECTURE = text_family(
    "exaone_moe",
    ("ExaoneMoeForCausalLM", "ExaoneMoeForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    sglang=SglangFacts(arguments={"disable_shared_experts_fusion": True}),
    refusal=_sglang_refusal,
    hub=HubNames(expert_bias=HUB_BIAS),
)
