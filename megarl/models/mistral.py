"""Mistral: Llama's decoder, with a sliding window in all layers where the config has one."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.llama import gpt_kwargs
from megarl.models.rope import rope_refusal
from megarl.models.weight_map import WeightMap
from megarl.models.windows import DEFAULT_WINDOW, in_all_layers, window_refusal


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder without biases.

    Raises:
        ModelError: anything that the dense decoder refuses.
    """
    sizes = dense.DenseSizes.from_hf(hf_config)
    sliding = in_all_layers(hf_config, sliding=hf_config.get("sliding_window", DEFAULT_WINDOW) is not None)
    return dense.transformer_config_kwargs(hf_config, sizes, sliding, DEFAULT_WINDOW)


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules."""
    sizes = dense.DenseSizes.from_hf(hf_config)
    return dense.weight_map(sizes, dense.attention_rules(sizes), dense.mlp_rules(sizes))


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    return window_refusal(transformer_config_kwargs(hf_config)) or rope_refusal(hf_config)


ARCHITECTURE = Architecture(
    name="mistral",
    hf_classes=("MistralForCausalLM", "MistralForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(refusal=_sglang_refusal),
)
