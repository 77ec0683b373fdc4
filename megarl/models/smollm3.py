"""SmolLM3: Llama's decoder, in some layers of which nothing rotates."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import dense
from megarl.models.architecture import HFConfig
from megarl.models.hf_fields import refuse_biases, size
from megarl.models.text_family import NOT_IN_SGLANG, text_family
from megarl.models.windows import in_all_layers, sliding_layers

DEFAULTS = {"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4}
"""transformers' defaults that differ from those of other families."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return {**DEFAULTS, **hf_config}


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder without biases, the layers without positions, and the windows, which these alone have by default.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    rotates = rotating_layers(hf_config)
    if not hf_config.get("use_sliding_window"):
        sliding = in_all_layers(hf_config, sliding=False)
    elif (listed := sliding_layers(hf_config)) is not None:
        sliding = listed
    elif hf_config.get("sliding_window") is None:
        sliding = frozenset()
    else:
        sliding = frozenset(layer for layer, here in enumerate(rotates) if not here)
    kwargs = dense.transformer_config_kwargs(hf_config, sizes, sliding)
    return kwargs | {"no_rope_freq": [int(not here) for here in rotates]}


def rotating_layers(hf_config: HFConfig) -> list[bool]:
    """Return whether queries and keys rotate, layer by layer.

    Raises:
        ModelError: `no_rope_layers` is not 1 or 0 for each layer.
    """
    layers, listed = size(hf_config, "num_hidden_layers"), hf_config.get("no_rope_layers")
    if listed is None:
        interval = size(hf_config, "no_rope_layer_interval", default=4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(flag not in (0, 1) for flag in listed):
        raise ModelError(
            f"config.json: no_rope_layers is {listed!r}; it must be a list of 1 (rotates) and 0 for {layers} layers"
        )
    return [bool(flag) for flag in listed[:layers]]


ARCHITECTURE = text_family(
    "smollm3",
    ("SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification"),
    transformer_config_kwargs,
    text_config=text_config,
    sglang=NOT_IN_SGLANG,
)
