"""Mistral: Llama's decoder, with a sliding window in all layers where the config has one."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import HFConfig
from megarl.models.text_family import text_family
from megarl.models.windows import DEFAULT_WINDOW, in_all_layers


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder without biases.

    Raises:
        ModelError: anything that the dense decoder refuses.
    """
    sliding = in_all_layers(hf_config, sliding=hf_config.get("sliding_window", DEFAULT_WINDOW) is not None)
    return dense.transformer_config_kwargs(hf_config, sizes, sliding, DEFAULT_WINDOW)


ARCHITECTURE = text_family(
    "mistral",
    ("MistralForCausalLM", "MistralForSequenceClassification"),
    transformer_config_kwargs,
    serves_windows=False,
)
