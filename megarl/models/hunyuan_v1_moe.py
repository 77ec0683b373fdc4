"""Hunyuan V1 with experts: the dense model's attention, and in every layer experts beside an MLP that every token uses."""

from __future__ import annotations

from typing import Any

from megarl.models import dense, hunyuan_v1_dense, moe
from megarl.models.architecture import HFConfig, SglangFacts
from megarl.models.hf_fields import refuse, size, size_of_all_layers
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap

OF_EACH_LAYER = ("moe_topk", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert")
"""Fields that may be a list of one number for each layer, which must be alike."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The dense model's, with one number for all layers.

    Raises:
        ModelError: layers differ, or `alpha` is no number above 0.
    """
    filled = hunyuan_v1_dense.text_config(hf_config)
    return filled | {field: size_of_all_layers(filled, field) for field in OF_EACH_LAYER if field in filled}


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`, and experts in place of the MLP.

    Raises:
        ModelError: experts of another width, or anything that the dense decoder refuses.
    """
    hunyuan_v1_dense.refuse_variants(hf_config)
    experts = experts_of(hf_config)
    return (
        dense.transformer_config_kwargs(hf_config, sizes)
        | {"qk_layernorm": True}
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.softmax_router_kwargs(experts, normalised=True)
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules, the norms of q and k, and the experts with the MLP beside them."""
    experts = experts_of(hf_config)
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, hf_router="gate.wg", hf_shared="shared_mlp.")
    attention = hunyuan_v1_dense.attention_rules(sizes)
    return dense.weight_map(sizes, attention, of_experts, num_experts=experts.num_experts)


def experts_of(hf_config: HFConfig) -> moe.MoeSizes:
    """Experts in all layers, each as wide as the MLP beside them.

    Raises:
        ModelError: they are not, or a field is missing or contradicts another.
    """
    ffn = size(hf_config, "intermediate_size")
    refuse(hf_config, "moe_intermediate_size", ffn, "transformers makes experts as wide as the MLP beside them")
    refuse(hf_config, "num_shared_expert", 1, "transformers has one MLP beside the experts")
    per_token = next((name for name in ("moe_topk", "num_experts_per_tok") if hf_config.get(name) is not None), "moe_topk")
    return moe.MoeSizes.from_hf(
        hf_config | {"num_experts_per_tok": size(hf_config, per_token, default=1)},
        range(size(hf_config, "num_hidden_layers")),
        experts_fields=("num_experts", "num_local_experts"),
        ffn_field="intermediate_size",
        shared_experts=1,
    )


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    missing = [name for name in ("moe_intermediate_size", "use_mixed_mlp_moe", "num_shared_expert") if not hf_config.get(name)]
    if missing:
        return f"its config.json must say {', '.join(missing)}, as published ones do, because SGLang reads it there"
    return hunyuan_v1_dense.sglang_refusal(hf_config)


ARCHITECTURE = text_family(
    "hunyuan_v1_moe",
    ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    sglang=SglangFacts(refusal=_sglang_refusal),
    traits=lambda hf_config: hunyuan_v1_dense.TRAITS,
)
