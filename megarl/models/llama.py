"""Llama 2, 3 and 3.x, and models of the same architecture (SmolLM2, ...): the plain dense decoder."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig
from megarl.models.hf_fields import refuse_biases
from megarl.models.weight_map import WeightMap


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder without biases.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    return dense.transformer_config_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config))


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config))


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules."""
    sizes = dense.DenseSizes.from_hf(hf_config)
    return dense.weight_map(sizes, dense.attention_rules(sizes), dense.mlp_rules(sizes))


ARCHITECTURE = Architecture(
    name="llama",
    hf_classes=("LlamaForCausalLM", "LlamaForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
)
