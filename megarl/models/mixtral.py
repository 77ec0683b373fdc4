"""Mixtral: Mistral's attention, and in every layer experts whose weights are normalised over the chosen ones."""

from __future__ import annotations

from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import Architecture, HFConfig, HubNames
from megarl.models.llama import gpt_kwargs
from megarl.models.weight_map import WeightMap

HUB = HubNames(expert=("w1", "w3", "w2"), block="block_sparse_moe")


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder with experts in place of the MLP.

    Raises:
        ModelError: a window shorter than the positions, or anything that the dense decoder refuses.
    """
    sizes, experts = _sizes(hf_config)
    return (
        dense.transformer_config_kwargs(hf_config, sizes, sliding_layers=sizes.num_layers)
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.softmax_router_kwargs(experts, normalised=True)
    )


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules, with the experts' under the names that Mixtral has for them."""
    sizes, experts = _sizes(hf_config)
    mlp = moe.mlp_rules(experts, sizes.hidden_size, hf_block=f"{HUB.block}.", hf_expert=HUB.expert)
    return dense.weight_map(sizes, dense.attention_rules(sizes), mlp, num_experts=experts.num_experts)


def _sizes(hf_config: HFConfig) -> tuple[dense.DenseSizes, moe.MoeSizes]:
    sizes = dense.DenseSizes.from_hf(hf_config)
    layers, fields = range(sizes.num_layers), ("num_local_experts", "num_experts")
    return sizes, moe.MoeSizes.from_hf(hf_config, layers, experts_fields=fields, ffn_field="intermediate_size")


ARCHITECTURE = Architecture(
    name="mixtral",
    hf_classes=("MixtralForCausalLM", "MixtralForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    hub=HUB,
)
