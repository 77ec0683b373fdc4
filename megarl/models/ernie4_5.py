"""ERNIE 4.5, dense: rotary pairs are neighbouring dimensions of a head, and biases are everywhere or nowhere."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import HFConfig
from megarl.models.hf_fields import with_defaults
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}
"""transformers' defaults that differ from those of other families."""
OF_HEADS = {"head_dim": 128, "num_key_value_heads": 2}
"""Those of fields that transformers computes from the others where they are null."""
SERVED_CLASS = "Ernie4_5_ForCausalLM"
"""The name by which SGLang 0.5.23 has the model."""


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder whose rotary pairs are neighbours, with biases on all projections where the config says so.

    Raises:
        ModelError: anything that the dense decoder refuses.
    """
    overrides = {"rotary_interleaved": True, "add_bias_linear": bool(hf_config.get("use_bias"))}
    return dense.transformer_config_kwargs(hf_config, sizes) | overrides


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules, and biases where the config has them."""
    biases = bool(hf_config.get("use_bias"))
    attention = dense.attention_rules(sizes, bias=biases, output_bias=biases)
    return dense.weight_map(sizes, attention, dense.mlp_rules(sizes, bias=biases))


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if hf_config.get("use_bias"):
        return "its MLP has no biases, whatever use_bias says"
    if (hf_config.get("architectures") or [None])[0] != SERVED_CLASS:
        return f"its config.json must name the class {SERVED_CLASS} in architectures, by which SGLang has this family"
    return None


ARCHITECTURE = text_family(
    "ernie4_5",
    ("Ernie4_5ForCausalLM", SERVED_CLASS, "Ernie4_5ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=lambda hf_config: (
        OF_HEADS
        | with_defaults(hf_config, DEFAULTS)
        | {name: None for name in OF_HEADS if hf_config.get(name, OF_HEADS) is None}
    ),
    refusal=_sglang_refusal,
)
