"""Mistral Small 4: DeepSeek-V3's latent attention, whose queries grow with their position, and experts by a softmax."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import deepseek_v3, dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig
from megarl.models.fused_experts import FusedExperts
from megarl.models.hf_fields import refuse, size, with_defaults
from megarl.models.ministral3 import query_scale
from megarl.models.rope import ORIGINAL, Rope
from megarl.models.text_family import NOT_IN_SGLANG, text_family
from megarl.models.weight_map import WeightMap

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    ORIGINAL: 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1_048_576,
}
"""transformers' defaults that published configs may leave out; of rotary parameters `ROPE`."""
QUERY_RANK = 1024
"""Its default of a field that may be null on purpose: queries without a latent."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing, and the rotary parameters of the part that rotates.

    Raises:
        ModelError: another share of a head is said to rotate than `qk_rope_head_dim`.
    """
    filled = with_defaults(hf_config, DEFAULTS) | {"q_lora_rank": hf_config.get("q_lora_rank", QUERY_RANK)}
    parameters = dict(filled.get("rope_parameters") or ROPE)
    rotated, others = (size(filled, f"qk_{part}_head_dim") for part in ("rope", "nope"))
    share = parameters.pop("partial_rotary_factor", rotated / (rotated + others))
    if int((rotated + others) * share) != rotated:
        raise ModelError(
            f"config.json: rope_parameters.partial_rotary_factor is {share!r}; it must be the share of "
            f"qk_rope_head_dim = {rotated} in a head's {rotated + others} dimensions"
        )
    return filled | {"rope_parameters": parameters}


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Arguments of MLATransformerConfig.

    Raises:
        ModelError: groups of experts, rotary embeddings that transformers has not in this family, or anything that DeepSeek-V3
            refuses.
    """
    experts, normalised = _experts(hf_config), bool(hf_config.get("norm_topk_prob", True))
    refuse(hf_config, "n_group", 1, "megatron-core ranks groups by logits where weights sum to one")
    refuse(hf_config, "topk_group", 1, "there is one group of experts")
    Rope.from_hf(hf_config, kinds=("yarn",))
    query_scale(hf_config)
    return (
        deepseek_v3.latent_kwargs(hf_config, sizes, experts)
        | moe.softmax_router_kwargs(experts, normalised=normalised)
        | {"moe_router_topk_scaling_factor": float(hf_config.get("routed_scaling_factor") or 1.0)}
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """Latent attention, dense first layers, and experts with the shared ones."""
    return deepseek_v3.latent_weight_map(hf_config, sizes, _experts(hf_config), expert_bias=False)


def traits(hf_config: HFConfig) -> DecoderTraits:
    """The scale of queries. Raises ModelError as `query_scale`."""
    return DecoderTraits(query_scale=query_scale(text_config(hf_config)))


def fused_experts(hf_config: HFConfig) -> FusedExperts:
    """The sizes of the experts that the hub stores together, as transformers has them."""
    experts = _experts(filled := text_config(hf_config))
    return FusedExperts(experts.num_experts, size(filled, "hidden_size"), experts.expert_ffn_size, transposed=False)


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    shared = size(hf_config, "n_shared_experts")  # without any, checkpoints of transformers have matrices without rows
    return moe.behind_dense_layers(hf_config, shared_experts=shared)


ARCHITECTURE = text_family(
    "mistral4",
    ("Mistral4ForCausalLM", "Mistral4ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    deepseek_v3.gpt_kwargs,
    text_config=text_config,
    sizes_of=deepseek_v3.latent_sizes,
    sglang=NOT_IN_SGLANG,
    traits=traits,
    fused_experts=fused_experts,
)
