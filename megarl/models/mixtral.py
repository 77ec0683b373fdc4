"""Mixtral: Mistral's attention, and in every layer experts whose weights are normalised over the chosen ones."""

from __future__ import annotations

from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import HFConfig, HubNames
from megarl.models.rope import Rope
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap
from megarl.models.windows import in_all_layers

HUB = HubNames(expert=("w1", "w3", "w2"), block="block_sparse_moe")


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with experts in place of the MLP.

    Raises:
        ModelError: anything that the dense decoder refuses.
    """
    experts = moe.in_every_layer(hf_config)
    sliding = in_all_layers(hf_config, sliding=hf_config.get("sliding_window") is not None)
    return (
        dense.transformer_config_kwargs(hf_config, sizes, sliding)
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.softmax_router_kwargs(experts, normalised=True)
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules, with the experts' under the names that Mixtral has for them."""
    experts = moe.in_every_layer(hf_config)
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, hf_block=f"{HUB.block}.", hf_expert=HUB.expert)
    return dense.weight_map(sizes, dense.attention_rules(sizes), of_experts, num_experts=experts.num_experts)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    rope = Rope.from_hf(hf_config)
    if rope.kind != "default":
        return f"it takes no notice of {rope.field}.rope_type = {rope.kind!r}"
    return moe.tied_refusal(hf_config)


ARCHITECTURE = text_family(
    "mixtral",
    ("MixtralForCausalLM", "MixtralForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    refusal=_sglang_refusal,
    serves_windows=False,
    hub=HUB,
)
