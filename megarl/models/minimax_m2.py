"""MiniMax-M2: one norm of all query heads together and one of all keys, a part of a head rotates, and experts in every layer.

Experts are scored by sigmoids, chosen with a correction bias and weighted by what they score without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig, HubNames
from megarl.models.hf_fields import refuse, size, with_defaults
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap

HUB = HubNames(expert=("w1", "w3", "w2"), block="block_sparse_moe")
DEFAULTS = {"rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8}
"""transformers' defaults that differ from those of other families."""
OF_PUBLISHED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "router_jitter_noise": 0.0,
}
"""Fields that transformers does not read, or only in training, with the only values that megarl has a model for."""
READ_BY_SGLANG = ("use_qk_norm", "use_routing_bias", "scoring_func")
"""Those of them that SGLang 0.5.23 reads: without them it leaves out norms and bias, or does not start."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with defaults; `rotary_dim`, as published ones have it, as the share of a head that rotates."""
    filled = with_defaults(hf_config, DEFAULTS)
    if filled.get("rotary_dim") is not None:
        filled.setdefault("partial_rotary_factor", size(filled, "rotary_dim") / size(filled, "head_dim"))
    return filled


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`, and experts in place of the MLP.

    Raises:
        ModelError: layers that attend otherwise, another router, or anything that the dense decoder refuses.
    """
    for field, value in OF_PUBLISHED.items():
        refuse(hf_config, field, value, "so are all published models of this family")
    if any(kind != 1 for kind in hf_config.get("attn_type_list") or ()):
        raise ModelError(
            f"config.json: attn_type_list is {hf_config['attn_type_list']!r:.80}; it must have 1 for every layer: "
            "MiniMax-M2 has no linear attention"
        )
    experts = moe.in_every_layer(hf_config)
    return (
        dense.transformer_config_kwargs(hf_config, sizes)
        | {"qk_layernorm": True}
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.sigmoid_router_kwargs({}, experts)
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules with norms of all heads together, and the experts' under the names that MiniMax has for them."""
    experts = moe.in_every_layer(hf_config)
    attention = _norms_as_heads(dense.attention_rules(sizes, projection_norms=True), sizes)
    names = {"hf_block": f"{HUB.block}.", "hf_expert": HUB.expert, "hf_expert_bias": "e_score_correction_bias"}
    mlp = moe.mlp_rules(experts, sizes.hidden_size, expert_bias=True, **names)  # type: ignore[arg-type]
    modules = range(size(hf_config, "num_mtp_modules", default=0, least=0))
    left_out = tuple(f"model.layers.{sizes.num_layers + number}." for number in modules)
    return dense.weight_map(sizes, attention, mlp, num_experts=experts.num_experts, left_out=left_out)


def _norms_as_heads(rules: Iterable[Rule], sizes: dense.DenseSizes) -> list[Rule]:
    """The rules, with norms of which a rank of SGLang's engines holds the part of its heads."""
    heads = {"q_layernorm.weight": sizes.num_heads, "k_layernorm.weight": sizes.num_groups}
    return [replace(rule, engine_heads=heads.get(rule.megatron_name.partition(".self_attention.")[2])) for rule in rules]


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    missing = [f"{field} = {OF_PUBLISHED[field]!r}" for field in READ_BY_SGLANG if field not in hf_config]
    if missing:
        return f"its config.json must say {', '.join(missing)}, as published ones do, because SGLang reads them there"
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if hf_config.get("rotary_dim") is None or parameters.get("partial_rotary_factor") is not None:
        return "its config.json must say rotary_dim and no partial_rotary_factor, because SGLang reads it there alone"
    return moe.tied_refusal(hf_config)


ARCHITECTURE = text_family(
    "minimax_m2",
    ("MiniMaxM2ForCausalLM", "MiniMaxM2ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    partial(dense.gpt_kwargs, partial_rotary=True),
    text_config=text_config,
    refusal=_sglang_refusal,
    hub=HUB,
    traits=lambda hf_config: DecoderTraits(projection_norms=True),
)
