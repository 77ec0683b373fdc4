"""OLMo 2: norms after attention and MLP instead of before them, and a norm of all query heads together and one of all keys."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, DecoderTraits, HFConfig, SglangFacts
from megarl.models.hf_fields import refuse, refuse_biases, with_defaults
from megarl.models.rope import rope_refusal
from megarl.models.weight_map import WeightMap

DEFAULTS = {"rms_norm_eps": 1e-5}
"""transformers' default that differs from that of other families."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return with_defaults(hf_config, DEFAULTS)


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`.

    Raises:
        ModelError: biases, clipped projections, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    refuse(hf_config, "clip_qkv", None, "OLMo 2 norms queries and keys instead")
    hf_config = text_config(hf_config)
    return dense.transformer_config_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config)) | {"qk_layernorm": True}


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config))


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules without norms before attention and MLP, and with those behind them."""
    sizes = dense.DenseSizes.from_hf(hf_config)
    attention = dense.attention_rules(sizes, projection_norms=True, pre_norm=False)
    after = dense.post_norm_rules(sizes, "post_attention_layernorm", "post_feedforward_layernorm")
    return dense.weight_map(sizes, attention, [*after, *dense.mlp_rules(sizes, pre_norm=False)])


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Norms behind attention and MLP only, and of all heads together."""
    return DecoderTraits(pre_norms=False, post_norms=True, projection_norms=True)


def sglang_refusal(hf_config: HFConfig) -> str | None:
    """Why SGLang cannot serve such a model; None: it can."""
    sizes = dense.DenseSizes.from_hf(hf_config)
    if sizes.head_dim * sizes.num_heads != sizes.hidden_size:
        return f"it gives the heads hidden_size / num_attention_heads dimensions, whatever head_dim = {sizes.head_dim} says"
    return rope_refusal(hf_config)


ARCHITECTURE = Architecture(
    name="olmo2",
    hf_classes=("Olmo2ForCausalLM", "Olmo2ForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(refusal=sglang_refusal, copies_kv_heads=False),
    text_config=text_config,
    traits=traits,
)
