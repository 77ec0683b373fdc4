"""Hunyuan V1 with experts: the dense model's attention, and in every layer experts beside an MLP that every token uses."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, hunyuan_v1_dense, moe
from megarl.models.architecture import HFConfig, SglangFacts
from megarl.models.hf_fields import size, size_of_all_layers
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`, and experts in place of the MLP.

    Raises:
        ModelError: layers that differ, or anything that the dense decoder refuses.
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
    """Experts in all layers, each as wide as the MLP beside them; what may be said for each layer must be the same for all.

    Raises:
        ModelError: it is not, or a field is missing or contradicts another.
    """
    ffn, layers = size(hf_config, "intermediate_size"), range(size(hf_config, "num_hidden_layers"))
    for field, value in (("moe_intermediate_size", ffn), ("num_shared_expert", 1)):
        refused = size_of_all_layers(hf_config, field, default=value) != value
        if refused:
            raise ModelError(f"config.json: {field} is {hf_config[field]!r:.80}; it must be {value} in all layers")
    per_token = next((name for name in ("moe_topk", "num_experts_per_tok") if hf_config.get(name) is not None), "moe_topk")
    alike = {"num_experts": size(hf_config, "num_experts"), "num_experts_per_tok": size_of_all_layers(hf_config, per_token, 1)}
    return moe.MoeSizes.from_hf(
        hf_config | alike, layers, experts_fields=("num_experts",), ffn_field="intermediate_size", shared_experts=1
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
    text_config=hunyuan_v1_dense.text_config,
    sglang=SglangFacts(refusal=_sglang_refusal),
    traits=lambda hf_config: hunyuan_v1_dense.TRAITS,
)
