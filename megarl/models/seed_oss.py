"""Seed-OSS: Llama's decoder with biases on q, k and v, and heads that are wider than hidden size over heads."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import HFConfig
from megarl.models.hf_fields import refuse
from megarl.models.text_family import NOT_IN_SGLANG, text_family
from megarl.models.weight_map import WeightMap


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder, with biases on q, k and v where the config says so.

    Raises:
        ModelError: a bias on o or the MLP, or anything that the dense decoder refuses.
    """
    refuse(hf_config, "attention_out_bias", False, "megatron-core has no bias on o without one on the MLP")
    refuse(hf_config, "mlp_bias", False, "megatron-core has no bias on the MLP without one on the attention")
    return dense.transformer_config_kwargs(hf_config, sizes) | {"add_qkv_bias": bool(hf_config["attention_bias"])}


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules, with biases on q, k and v."""
    return dense.weight_map(sizes, dense.attention_rules(sizes, bias=bool(hf_config["attention_bias"])), dense.mlp_rules(sizes))


ARCHITECTURE = text_family(
    "seed_oss",
    ("SeedOssForCausalLM", "SeedOssForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    defaults={"num_key_value_heads": 8, "attention_bias": True, "head_dim": 128},
    sglang=NOT_IN_SGLANG,
)
