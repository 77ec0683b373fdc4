"""GLM-4 (0414), dense: norms before and after attention and MLP, half of a head rotates in neighbouring pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

from megarl.models import dense
from megarl.models.architecture import DecoderTraits, HFConfig
from megarl.models.fused_rows import FusedRows, gate_over_up
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder whose rotary pairs are neighbours, with biases on q, k and v where the config says so.

    Raises:
        ModelError: anything that the dense decoder refuses.
    """
    overrides = {"add_qkv_bias": bool(hf_config["attention_bias"]), "rotary_interleaved": True}
    return dense.transformer_config_kwargs(hf_config, sizes) | overrides


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules and two further norms in every layer."""
    attention = dense.attention_rules(sizes, bias=bool(hf_config["attention_bias"]))
    after = dense.post_norm_rules(sizes, "post_self_attn_layernorm", "post_mlp_layernorm")
    return dense.weight_map(sizes, attention, [*after, *dense.mlp_rules(sizes)])


def fused_rows(hf_config: HFConfig) -> FusedRows:
    """Gate and up are one tensor."""
    sizes = dense.DenseSizes.from_hf(ARCHITECTURE.text_config(hf_config))
    return FusedRows(gate_over_up(sizes.ffn_size), sizes.hidden_size)


ARCHITECTURE = text_family(
    "glm4",
    ("Glm4ForCausalLM", "Glm4ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    partial(dense.gpt_kwargs, partial_rotary=True),
    defaults={"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128},
    fused_rows=fused_rows,
    traits=lambda hf_config: DecoderTraits(post_norms=True),
)
