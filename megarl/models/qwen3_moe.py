"""Qwen3-MoE: Qwen3's attention, and experts in all layers or some."""

from __future__ import annotations

from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import HFConfig, SglangFacts
from megarl.models.hf_fields import refuse_biases, size
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap
from megarl.models.windows import DEFAULT_WINDOW, in_all_layers


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`, and experts in place of the MLP where the config says so.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    experts = experts_of(hf_config)
    sliding = in_all_layers(hf_config, sliding=bool(hf_config.get("use_sliding_window")))
    return (
        dense.transformer_config_kwargs(hf_config, sizes, sliding, DEFAULT_WINDOW)
        | {"qk_layernorm": True}
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.softmax_router_kwargs(experts, normalised=bool(hf_config.get("norm_topk_prob", False)))
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules, the norms of q and k, and the experts' where a layer has them."""
    experts = experts_of(hf_config)
    of_experts = moe.mlp_rules(experts, sizes.hidden_size)
    return moe.weight_map(sizes, experts, dense.attention_rules(sizes, head_norms=True), of_experts)


def experts_of(hf_config: HFConfig) -> moe.MoeSizes:
    """Every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    step, dense_only = size(hf_config, "decoder_sparse_step", default=1), hf_config.get("mlp_only_layers") or ()
    layers = (n for n in range(size(hf_config, "num_hidden_layers")) if (n + 1) % step == 0 and n not in dense_only)
    fields = ("num_experts", "num_local_experts")
    return moe.MoeSizes.from_hf(hf_config, layers, experts_fields=fields, ffn_field="moe_intermediate_size")


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1:
        return "it gives every layer experts, whatever mlp_only_layers and decoder_sparse_step say"
    return moe.tied_refusal(hf_config)


ARCHITECTURE = text_family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    sglang=SglangFacts(replicates_attention=True),
    refusal=_sglang_refusal,
    serves_windows=False,
)
