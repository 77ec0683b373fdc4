"""Qwen3.5's text models with experts in every layer, and a shared one that a sigmoid gates. Otherwise as `qwen3_5_text.py`."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.hf_fields import refuse
from megarl.models.prediction_layer import beside_the_decoder
from megarl.models.weight_map import WeightMap
from megarl.options.linear_attention import delta_net, qwen3_next

EVERYWHERE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""Qwen3-Next's fields, which these configs do not have."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """Qwen3-Next's config.

    Raises:
        ModelError: the experts' weights of a token do not sum to one, or some layers have no experts.
    """
    for field, only in {"norm_topk_prob": True, **EVERYWHERE}.items():
        refuse(hf_config, field, only, "transformers computes nothing else for this family")
    width = hf_config.get("moe_intermediate_size")  # no layer has another MLP
    return {"intermediate_size": width, **qwen3_next.text_config(hf_config), **EVERYWHERE}


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The arguments of Qwen3-Next."""
    return qwen3_next.transformer_config_kwargs(text_config(hf_config))


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    return qwen3_next.gpt_kwargs(text_config(hf_config))


def weight_map(hf_config: HFConfig) -> WeightMap:
    """Qwen3-Next's rules, with separate input projections."""
    hf_config = text_config(hf_config)
    sizes, delta, experts = qwen3_next.sizes_of(hf_config)
    projection = delta_net.separate_projections(sizes.hidden_size, delta)
    attention = delta_net.attention_rules(sizes, delta, projection)
    mlp = qwen3_next.expert_rules(experts, sizes.hidden_size)
    more = beside_the_decoder(hf_config, sizes, [*delta_net.gated_attention_rules(sizes), *mlp])
    return dense.weight_map(sizes, attention, mlp, num_experts=experts.num_experts, **more)


ARCHITECTURE = Architecture(
    name="qwen3_5_moe_text",
    hf_classes=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(),
    text_config=text_config,
    linear=delta_net.linear_attention,
)
