"""Llama 2, 3 and 3.x, and models of the same architecture (SmolLM2, ...): the plain dense decoder."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.hf_fields import refuse_biases
from megarl.models.prediction_layer import behind_the_decoder
from megarl.models.rope import rope_refusal
from megarl.models.weight_map import WeightMap


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder, with biases on all projections or on none.

    Raises:
        ModelError: biases on the attention or on the MLP alone, or anything that the dense decoder refuses.
    """
    biases = has_biases(hf_config)
    if not biases:
        refuse_biases(hf_config)
    return dense.transformer_config_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config)) | {"add_bias_linear": biases}


def has_biases(hf_config: HFConfig) -> bool:
    """Return whether all projections of attention and MLP have biases."""
    return bool(hf_config.get("attention_bias")) and bool(hf_config.get("mlp_bias"))


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config))


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules, and biases where the config has them everywhere."""
    sizes, biases = dense.DenseSizes.from_hf(hf_config), has_biases(hf_config)
    attention = dense.attention_rules(sizes, bias=biases, output_bias=biases)
    mlp = dense.mlp_rules(sizes, bias=biases)
    return dense.weight_map(sizes, attention, mlp, **behind_the_decoder(hf_config, sizes, [*attention, *mlp]))


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if has_biases(hf_config):
        return "its MLP has no biases, whatever mlp_bias says"
    return rope_refusal(hf_config)


ARCHITECTURE = Architecture(
    name="llama",
    hf_classes=("LlamaForCausalLM", "LlamaForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(refusal=_sglang_refusal),
)
