"""ERNIE 4.5 with experts: a softmax scores them, a correction bias helps to choose; layers at both ends may be dense."""

from __future__ import annotations

from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig, HubNames
from megarl.models.hf_fields import positive, refuse, size
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "moe_norm_min": 1e-12,
}
"""transformers' defaults that differ from those of other families."""
BIAS = "moe_statics.e_score_correction_bias"


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder whose rotary pairs are neighbours, with experts in place of the MLP in most layers.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse(hf_config, "use_bias", False, "megatron-core has biases on experts if it has them on all other projections")
    experts = experts_of(hf_config)
    return (
        dense.transformer_config_kwargs(hf_config, sizes)
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.softmax_router_kwargs(experts, normalised=True)
        | {"rotary_interleaved": True, "moe_router_dtype": "fp32"}
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules, dense layers, and experts with their bias and the shared ones; layers that predict are left out."""
    experts = experts_of(hf_config)
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, expert_bias=True, hf_expert_bias=BIAS, expert_bias_is_row=True)
    return moe.weight_map(sizes, experts, dense.attention_rules(sizes), of_experts, left_out=("model.mtp_",))


def experts_of(hf_config: HFConfig) -> moe.MoeSizes:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` has experts.

    Raises:
        ModelError: a field is no such integer, or contradicts another.
    """
    layers, interval = size(hf_config, "num_hidden_layers"), size(hf_config, "moe_layer_interval", default=1)
    first = size(hf_config, "moe_layer_start_index", default=1, least=0)
    last = size(hf_config, "moe_layer_end_index", default=-1, least=-1)
    with_experts = range(first, layers if last == -1 else min(last + 1, layers))
    per_token = next((name for name in ("moe_k", "num_experts_per_tok") if hf_config.get(name) is not None), "moe_k")
    return moe.MoeSizes.from_hf(
        hf_config | {"num_experts_per_tok": size(hf_config, per_token, default=6)},
        (layer for layer in with_experts if (layer + 1) % interval == 0),
        experts_fields=("moe_num_experts", "num_experts"),
        ffn_field="moe_intermediate_size",
        shared_experts=size(hf_config, "moe_num_shared_experts", default=2, least=0),
    )


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if hf_config.get("moe_layer_interval", 1) != 1:
        return "it counts moe_layer_interval from the first layer with experts, and transformers from the first of all"
    return None


ARCHITECTURE = text_family(
    "ernie4_5_moe",
    ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    defaults=DEFAULTS,
    refusal=_sglang_refusal,
    hub=HubNames(renamed=((f".gate.{BIAS}", f".{BIAS}"),)),
    traits=lambda hf_config: DecoderTraits(corrected_softmax=positive(hf_config, "moe_norm_min", 1e-12)),
)
