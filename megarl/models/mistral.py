"""Mistral: Llama's decoder, with a sliding window in all layers where the config has one."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig
from megarl.models.llama import gpt_kwargs, weight_map


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder without biases.

    Raises:
        ModelError: a window shorter than the positions, or anything that the dense decoder refuses.
    """
    sizes = dense.DenseSizes.from_hf(hf_config)
    return dense.transformer_config_kwargs(hf_config, sizes, sliding_layers=sizes.num_layers)


ARCHITECTURE = Architecture(
    name="mistral",
    hf_classes=("MistralForCausalLM", "MistralForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
)
