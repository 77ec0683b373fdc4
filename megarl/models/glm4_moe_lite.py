"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, under GLM-4.5's names for which layers have them."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import deepseek_v3, dense, moe
from megarl.models.architecture import HFConfig, SglangFacts
from megarl.models.hf_fields import size, with_defaults
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
}
"""transformers' defaults that published configs may leave out."""
QUERY_RANK = 768
"""Its default of a field that may be null on purpose: queries without a latent."""
PREDICTION_LAYERS = 1
"""How many layers for multi-token prediction a checkpoint has whose config does not say."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return with_defaults(hf_config, DEFAULTS) | {"q_lora_rank": hf_config.get("q_lora_rank", QUERY_RANK)}


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Arguments of MLATransformerConfig.

    Raises:
        ModelError: layers that are neither dense nor have experts, or anything that DeepSeek-V3 refuses.
    """
    experts = _experts(hf_config)
    return deepseek_v3.latent_kwargs(hf_config, sizes, experts) | deepseek_v3.router_kwargs(hf_config, experts)


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """Latent attention, dense layers, and experts with their bias and the shared ones."""
    experts = _experts(hf_config)
    return deepseek_v3.latent_weight_map(hf_config, sizes, experts, prediction_layers=PREDICTION_LAYERS)


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    layers, sparse = size(hf_config, "num_hidden_layers"), moe.listed_layers(hf_config, dense_layers=1)
    first = sparse[0] if sparse else layers
    stated = size(hf_config, "first_k_dense_replace", default=first, least=0)
    if stated != first or sparse != [*range(first, layers)]:
        raise ModelError(
            f"config.json: mlp_layer_types says that the layers {sparse!r:.80} have experts, and first_k_dense_replace is "
            f"{stated}; these must be all layers from that one on"
        )
    shared = size(hf_config, "n_shared_experts")  # without any, checkpoints of transformers have matrices without rows
    return moe.behind_dense_layers(hf_config, dense_layers=first, shared_experts=shared)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if "first_k_dense_replace" not in hf_config or not isinstance(hf_config.get("n_routed_experts"), int):
        return "its config.json must say first_k_dense_replace and n_routed_experts, as published ones do"
    return moe.tied_refusal(hf_config) or deepseek_v3.fp8_refusal(hf_config)


ARCHITECTURE = text_family(
    "glm4_moe_lite",
    ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    deepseek_v3.gpt_kwargs,
    text_config=text_config,
    sizes_of=deepseek_v3.latent_sizes,
    sglang=SglangFacts(replicates_attention=True, arguments={"disable_shared_experts_fusion": True}),
    refusal=_sglang_refusal,
)
