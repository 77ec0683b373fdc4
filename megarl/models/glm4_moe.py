"""GLM-4.5 and GLM-4.6: grouped attention of which half of a head rotates, and DeepSeek-V3's experts behind dense first layers.

`num_nextn_predict_layers` says whether there is a layer for multi-token prediction (`prediction_layer.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import HFConfig, SglangFacts
from megarl.models.hf_fields import size
from megarl.models.prediction_layer import behind_the_decoder
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap

DEFAULTS = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
"""transformers' defaults that differ from those of other families."""
PREDICTION_LAYERS = 1
"""How many a checkpoint has whose config does not say."""


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder, with biases on q, k and v or norms of their heads where the config says so, and experts.

    Raises:
        ModelError: another router than DeepSeek-V3's, or anything that the dense decoder refuses.
    """
    experts = _experts(hf_config)
    return (
        dense.transformer_config_kwargs(hf_config, sizes)
        | {"add_qkv_bias": _has_bias(hf_config), "qk_layernorm": _has_head_norms(hf_config)}
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.sigmoid_router_kwargs(hf_config, experts)
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules, the dense first layers, and experts with their bias and the shared one."""
    experts = _experts(hf_config)
    attention = dense.attention_rules(sizes, bias=_has_bias(hf_config), head_norms=_has_head_norms(hf_config))
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, expert_bias=True)
    more = behind_the_decoder(hf_config, sizes, [*attention, *of_experts], PREDICTION_LAYERS)
    return moe.weight_map(sizes, experts, attention, of_experts, **more)


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    size(hf_config, "n_shared_experts", default=1)  # without any, checkpoints of transformers have matrices without rows
    return moe.behind_dense_layers(hf_config, dense_layers=1, shared_experts=1)


def _has_bias(hf_config: HFConfig) -> bool:
    return bool(hf_config.get("attention_bias", False))


def _has_head_norms(hf_config: HFConfig) -> bool:
    return bool(hf_config.get("use_qk_norm", False))


ARCHITECTURE = text_family(
    "glm4_moe",
    ("Glm4MoeForCausalLM", "Glm4MoeForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    partial(dense.gpt_kwargs, partial_rotary=True),
    defaults=DEFAULTS,
    sglang=SglangFacts(replicates_attention=True, arguments={"disable_shared_experts_fusion": True}),
    refusal=moe.tied_refusal,
)
