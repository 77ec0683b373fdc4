"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, and experts with a shared one that a sigmoid gates.

A folder may have a layer for multi-token prediction, with full attention and experts (option `prediction`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models import dense, moe, qwen3_moe
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.hf_fields import size
from megarl.models.prediction_layer import beside_the_decoder
from megarl.models.rope import rope_refusal
from megarl.models.weight_map import Rule, WeightMap
from megarl.options.linear_attention import delta_net


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return {"norm_topk_prob": True, **delta_net.text_config(hf_config)}


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Linear and gated attention, and experts in place of the MLP where the config says so.

    Raises:
        ModelError: biases, layers of another kind, or anything that the dense decoder refuses.
    """
    hf_config = text_config(hf_config)
    sizes, delta, experts = sizes_of(hf_config)
    return (
        delta_net.transformer_config_kwargs(hf_config, sizes, delta)
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.softmax_router_kwargs(experts, normalised=bool(hf_config["norm_topk_prob"]))
        | {"moe_shared_expert_gate": True}
    )


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    hf_config = text_config(hf_config)
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config), partial_rotary=True)


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The rules of both kinds of attention, the dense MLP where a layer has no experts, and the experts with the shared one."""
    hf_config = text_config(hf_config)
    sizes, delta, experts = sizes_of(hf_config)
    dense_layers = frozenset(range(sizes.num_layers)) - experts.layers
    attention = delta_net.attention_rules(sizes, delta, delta_net.interleaved_projection(sizes.hidden_size, delta))
    of_experts = expert_rules(experts, sizes.hidden_size)
    more = beside_the_decoder(hf_config, sizes, [*delta_net.gated_attention_rules(sizes), *of_experts])
    mlp = [*dense.mlp_rules(sizes, dense_layers), *of_experts]
    return dense.weight_map(sizes, attention, mlp, num_experts=experts.num_experts, **more)


def expert_rules(experts: moe.MoeSizes, hidden_size: int) -> list[Rule]:
    """The experts, and the shared one with what scales its output."""
    return moe.mlp_rules(experts, hidden_size, hf_shared="shared_expert.", hf_shared_gate="shared_expert_gate.weight")


def sizes_of(hf_config: HFConfig) -> tuple[dense.DenseSizes, delta_net.DeltaSizes, moe.MoeSizes]:
    """Sizes of a config with its defaults: the decoder's, those of linear attention and of the experts."""
    shared = size(hf_config, "shared_expert_intermediate_size", default=512)
    experts = replace(qwen3_moe.experts_of(hf_config), shared_ffn_size=shared)
    return dense.DenseSizes.from_hf(hf_config), delta_net.DeltaSizes.from_hf(hf_config), experts


ARCHITECTURE = Architecture(
    name="qwen3_next",
    hf_classes=("Qwen3NextForCausalLM", "Qwen3NextForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(refusal=lambda hf_config: moe.tied_refusal(hf_config) or rope_refusal(hf_config)),
    text_config=text_config,
    linear=delta_net.linear_attention,
)
