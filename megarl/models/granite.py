"""Granite 3, dense: Llama's decoder with multipliers of embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import dense
from megarl.models.architecture import Architecture, DecoderTraits, HFConfig
from megarl.models.hf_fields import refuse_biases
from megarl.models.llama import gpt_kwargs, weight_map


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder without biases, whose attention has a scale of its own.

    Raises:
        ModelError: biases, a multiplier that is no positive number, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    traits(hf_config)
    scale = _multiplier(hf_config, "attention_multiplier")
    return dense.transformer_config_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config)) | {"softmax_scale": scale}


def traits(hf_config: HFConfig) -> DecoderTraits:
    """The other multipliers. Raises ModelError if one is no positive number."""
    return DecoderTraits(
        embedding_multiplier=_multiplier(hf_config, "embedding_multiplier"),
        residual_multiplier=_multiplier(hf_config, "residual_multiplier"),
        logits_divisor=_multiplier(hf_config, "logits_scaling"),
    )


def _multiplier(hf_config: HFConfig, field: str) -> float:
    value = hf_config.get(field, 1.0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {field} is {value!r}; it must be a number above 0")
    return float(value)


ARCHITECTURE = Architecture(
    name="granite",
    hf_classes=("GraniteForCausalLM", "GraniteForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    traits=traits,
)
