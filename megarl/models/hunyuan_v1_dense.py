"""Hunyuan V1, dense: norms of every q and k head behind the rotation, and a rotary base that grows with `alpha`."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import dense
from megarl.models.architecture import DecoderTraits, HFConfig, SglangFacts
from megarl.models.hf_fields import refuse, refuse_biases, with_defaults
from megarl.models.rope import Rope, rope_refusal
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap

TRAITS = DecoderTraits(norms_behind_rotary=True)


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with defaults, and with the base of frequencies that `alpha` makes of dynamic NTK's.

    Raises:
        ModelError: `alpha` is no number above 0.
    """
    filled = with_defaults(hf_config, {"rms_norm_eps": 1e-5, "head_dim": hf_config.get("attention_head_dim")})
    rope = Rope.from_hf(filled)
    if rope.kind != "dynamic" or not (alpha := rope.parameters.get("alpha")):
        return filled
    if not isinstance(alpha, (int, float)) or alpha < 0:
        raise ModelError(f"config.json: {rope.field}.alpha is {alpha!r}; it must be a number above 0")
    head_dim = dense.DenseSizes.from_hf(filled).head_dim
    base = rope.base * alpha ** (head_dim / (head_dim - 2))
    return filled | {rope.field: rope.parameters | {"rope_theta": base, "factor": 1.0}}


def refuse_variants(hf_config: HFConfig) -> None:
    """Raise ModelError if a config asks for biases or for what only unpublished models of the family have."""
    refuse_biases(hf_config)
    refuse(hf_config, "use_qk_norm", True, "transformers norms queries and keys in any case")
    refuse(hf_config, "use_cla", False, "transformers gives every layer keys and values of its own")


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`.

    Raises:
        ModelError: biases, layers without keys of their own, or anything that the dense decoder refuses.
    """
    refuse_variants(hf_config)
    return dense.transformer_config_kwargs(hf_config, sizes) | {"qk_layernorm": True}


def attention_rules(sizes: dense.DenseSizes) -> list[Rule]:
    """The common attention with norms of every q and k head, as Hunyuan calls them."""
    return dense.attention_rules(sizes, head_norms=True, hf_norms=("query_layernorm", "key_layernorm"))


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules and the norms of q and k."""
    return dense.weight_map(sizes, attention_rules(sizes), dense.mlp_rules(sizes))


def sglang_refusal(hf_config: HFConfig) -> str | None:
    """Why SGLang cannot serve such a model; None: it can. It computes `alpha` as transformers does."""
    missing = [f"{name} = {value}" for name, value in (("use_qk_norm", "true"), ("head_dim", "…")) if not hf_config.get(name)]
    if missing:
        return f"its config.json must say {', '.join(missing)}, as published ones do, because SGLang reads it there"
    rope = Rope.from_hf(hf_config)
    return None if rope.kind == "dynamic" and rope.parameters.get("alpha") else rope_refusal(hf_config)


ARCHITECTURE = text_family(
    "hunyuan_v1_dense",
    ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    sglang=SglangFacts(refusal=sglang_refusal),
    traits=lambda hf_config: TRAITS,
)
