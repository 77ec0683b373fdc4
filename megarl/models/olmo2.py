"""OLMo 2: norms after attention and MLP instead of before them, and a norm of all query heads together and one of all keys."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import DecoderTraits, HFConfig, SglangFacts
from megarl.models.hf_fields import refuse, refuse_biases
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`.

    Raises:
        ModelError: biases, clipped projections, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    refuse(hf_config, "clip_qkv", None, "OLMo 2 norms queries and keys instead")
    return dense.transformer_config_kwargs(hf_config, sizes) | {"qk_layernorm": True}


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules without norms before attention and MLP, and with those behind them."""
    attention = dense.attention_rules(sizes, projection_norms=True, pre_norm=False)
    after = dense.post_norm_rules(sizes, "post_attention_layernorm", "post_feedforward_layernorm")
    return dense.weight_map(sizes, attention, [*after, *dense.mlp_rules(sizes, pre_norm=False)])


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Norms behind attention and MLP only, and of all heads together."""
    return DecoderTraits(pre_norms=False, post_norms=True, projection_norms=True)


def sglang_refusal(hf_config: HFConfig) -> str | None:
    """Why SGLang cannot serve such a model, whatever its rotary embedding; None: it can."""
    sizes = dense.DenseSizes.from_hf(hf_config)
    if sizes.head_dim * sizes.num_heads == sizes.hidden_size:
        return None
    return f"it gives the heads hidden_size / num_attention_heads dimensions, whatever head_dim = {sizes.head_dim} says"


ARCHITECTURE = text_family(
    "olmo2",
    ("Olmo2ForCausalLM", "Olmo2ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    defaults={"rms_norm_eps": 1e-5},
    sglang=SglangFacts(copies_kv_heads=False),
    refusal=sglang_refusal,
    traits=traits,
)
