"""Llama 2, 3 and 3.x, and models of the same architecture (SmolLM2, ...): the plain dense decoder."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import HFConfig
from megarl.models.hf_fields import refuse_biases
from megarl.models.prediction_layer import behind_the_decoder
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder, with biases on all projections or on none.

    Raises:
        ModelError: biases on the attention or on the MLP alone, or anything that the dense decoder refuses.
    """
    biases = has_biases(hf_config)
    if not biases:
        refuse_biases(hf_config)
    return dense.transformer_config_kwargs(hf_config, sizes) | {"add_bias_linear": biases}


def has_biases(hf_config: HFConfig) -> bool:
    """Return whether all projections of attention and MLP have biases."""
    return bool(hf_config.get("attention_bias")) and bool(hf_config.get("mlp_bias"))


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules, and biases where the config has them everywhere."""
    biases = has_biases(hf_config)
    attention = dense.attention_rules(sizes, bias=biases, output_bias=biases)
    mlp = dense.mlp_rules(sizes, bias=biases)
    return dense.weight_map(sizes, attention, mlp, **behind_the_decoder(hf_config, sizes, [*attention, *mlp]))


ARCHITECTURE = text_family(
    "llama",
    ("LlamaForCausalLM", "LlamaForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    refusal=lambda hf_config: "its MLP has no biases, whatever mlp_bias says" if has_biases(hf_config) else None,
)
