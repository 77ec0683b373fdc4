"""GLM-4 (0414), dense: norms before and after attention and MLP, half of a head rotates in neighbouring pairs."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, DecoderTraits, HFConfig
from megarl.models.fused_rows import FusedRows, gate_over_up
from megarl.models.hf_fields import with_defaults
from megarl.models.weight_map import WeightMap

DEFAULTS = {"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}
"""transformers' defaults that differ from those of other families."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return with_defaults(hf_config, DEFAULTS)


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder whose rotary pairs are neighbours, with biases on q, k and v where the config says so.

    Raises:
        ModelError: anything that the dense decoder refuses.
    """
    hf_config = text_config(hf_config)
    kwargs = dense.transformer_config_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config))
    return kwargs | {"add_qkv_bias": bool(hf_config["attention_bias"]), "rotary_interleaved": True}


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    hf_config = text_config(hf_config)
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config), partial_rotary=True)


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules and two further norms in every layer."""
    hf_config = text_config(hf_config)
    sizes = dense.DenseSizes.from_hf(hf_config)
    attention = dense.attention_rules(sizes, bias=bool(hf_config["attention_bias"]))
    after = dense.post_norm_rules(sizes, "post_self_attn_layernorm", "post_mlp_layernorm")
    return dense.weight_map(sizes, attention, [*after, *dense.mlp_rules(sizes)])


def fused_rows(hf_config: HFConfig) -> FusedRows:
    """Gate and up are one tensor."""
    sizes = dense.DenseSizes.from_hf(text_config(hf_config))
    return FusedRows(gate_over_up(sizes.ffn_size), sizes.hidden_size)


ARCHITECTURE = Architecture(
    name="glm4",
    hf_classes=("Glm4ForCausalLM", "Glm4ForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    text_config=text_config,
    fused_rows=fused_rows,
    traits=lambda hf_config: DecoderTraits(post_norms=True),
)
