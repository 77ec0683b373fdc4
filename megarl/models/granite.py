"""Granite 3, dense: Llama's decoder with multipliers of embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import DecoderTraits, HFConfig
from megarl.models.hf_fields import positive, refuse_biases
from megarl.models.llama import weight_map
from megarl.models.text_family import text_family


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder without biases, whose attention has a scale of its own.

    Raises:
        ModelError: biases, a multiplier that is no positive number, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    traits(hf_config)
    scale = positive(hf_config, "attention_multiplier", 1.0)
    return dense.transformer_config_kwargs(hf_config, sizes) | {"softmax_scale": scale}


def traits(hf_config: HFConfig) -> DecoderTraits:
    """The other multipliers. Raises ModelError if one is no positive number."""
    return DecoderTraits(
        embedding_multiplier=positive(hf_config, "embedding_multiplier", 1.0),
        residual_multiplier=positive(hf_config, "residual_multiplier", 1.0),
        logits_divisor=positive(hf_config, "logits_scaling", 1.0),
    )


ARCHITECTURE = text_family(
    "granite",
    ("GraniteForCausalLM", "GraniteForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    traits=traits,
)
