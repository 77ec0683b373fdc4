"""GLM-4.5 and GLM-4.6: grouped attention of which half of a head rotates, and DeepSeek-V3's experts behind dense first layers.

`num_nextn_predict_layers` says whether there is a layer for multi-token prediction (`prediction_layer.py`).
"""

from __future__ import annotations

from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.hf_fields import size, with_defaults
from megarl.models.prediction_layer import behind_the_decoder
from megarl.models.rope import rope_refusal
from megarl.models.weight_map import WeightMap

DEFAULTS = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
"""transformers' defaults that differ from those of other families."""
PREDICTION_LAYERS = 1
"""How many a checkpoint has whose config does not say."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return with_defaults(hf_config, DEFAULTS)


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder, with biases on q, k and v or norms of their heads where the config says so, and experts.

    Raises:
        ModelError: another router than DeepSeek-V3's, or anything that the dense decoder refuses.
    """
    hf_config = text_config(hf_config)
    sizes, experts = dense.DenseSizes.from_hf(hf_config), _experts(hf_config)
    return (
        dense.transformer_config_kwargs(hf_config, sizes)
        | {"add_qkv_bias": _has_bias(hf_config), "qk_layernorm": _has_head_norms(hf_config)}
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.sigmoid_router_kwargs(hf_config, experts)
    )


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    hf_config = text_config(hf_config)
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config), partial_rotary=True)


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules, the dense first layers, and experts with their bias and the shared one."""
    sizes, experts = dense.DenseSizes.from_hf(hf_config), _experts(hf_config)
    attention = dense.attention_rules(sizes, bias=_has_bias(hf_config), head_norms=_has_head_norms(hf_config))
    dense_layers = frozenset(range(sizes.num_layers)) - experts.layers
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, expert_bias=True)
    more = behind_the_decoder(hf_config, sizes, [*attention, *of_experts], PREDICTION_LAYERS)
    mlp = [*dense.mlp_rules(sizes, dense_layers), *of_experts]
    return dense.weight_map(sizes, attention, mlp, num_experts=experts.num_experts, **more)


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    size(hf_config, "n_shared_experts", default=1)  # without any, checkpoints of transformers have matrices without rows
    return moe.behind_dense_layers(hf_config, dense_layers=1, shared_experts=1)


def _has_bias(hf_config: HFConfig) -> bool:
    return bool(hf_config.get("attention_bias", False))


def _has_head_norms(hf_config: HFConfig) -> bool:
    return bool(hf_config.get("use_qk_norm", False))


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    return moe.tied_refusal(hf_config) or rope_refusal(text_config(hf_config))


ARCHITECTURE = Architecture(
    name="glm4_moe",
    hf_classes=("Glm4MoeForCausalLM", "Glm4MoeForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(replicates_attention=True, refusal=_sglang_refusal, arguments={"disable_shared_experts_fusion": True}),
    text_config=text_config,
)
