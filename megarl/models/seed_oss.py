"""Seed-OSS: Llama's decoder with biases on q, k and v, and heads that are wider than hidden size over heads."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.hf_fields import refuse, with_defaults
from megarl.models.weight_map import WeightMap

DEFAULTS = {"num_key_value_heads": 8, "attention_bias": True, "head_dim": 128}
"""transformers' defaults that differ from those of other families."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return with_defaults(hf_config, DEFAULTS)


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder, with biases on q, k and v where the config says so.

    Raises:
        ModelError: a bias on o or the MLP, or anything that the dense decoder refuses.
    """
    hf_config = text_config(hf_config)
    refuse(hf_config, "attention_out_bias", False, "megatron-core has no bias on o without one on the MLP")
    refuse(hf_config, "mlp_bias", False, "megatron-core has no bias on the MLP without one on the attention")
    kwargs = dense.transformer_config_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config))
    return kwargs | {"add_qkv_bias": bool(hf_config["attention_bias"])}


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    hf_config = text_config(hf_config)
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config))


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules, with biases on q, k and v."""
    hf_config = text_config(hf_config)
    sizes = dense.DenseSizes.from_hf(hf_config)
    return dense.weight_map(sizes, dense.attention_rules(sizes, bias=bool(hf_config["attention_bias"])), dense.mlp_rules(sizes))


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    return "it has no model of this family, and would run transformers' own, whose weights it holds otherwise"


ARCHITECTURE = Architecture(
    name="seed_oss",
    hf_classes=("SeedOssForCausalLM", "SeedOssForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(refusal=_sglang_refusal),
    text_config=text_config,
)
