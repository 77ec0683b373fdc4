"""Qwen2 and Qwen2.5, dense: the dense decoder with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import HFConfig
from megarl.models.prediction_layer import behind_the_decoder
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap
from megarl.models.windows import DEFAULT_WINDOW, qwen_sliding_layers


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `add_qkv_bias`."""
    sliding = qwen_sliding_layers(hf_config)
    return dense.transformer_config_kwargs(hf_config, sizes, sliding, DEFAULT_WINDOW) | {"add_qkv_bias": True}


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules and the biases, packed as the weights are."""
    attention, mlp = dense.attention_rules(sizes, bias=True), dense.mlp_rules(sizes)
    more = {} if qwen_sliding_layers(hf_config) else behind_the_decoder(hf_config, sizes, [*attention, *mlp])
    return dense.weight_map(sizes, attention, mlp, **more)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    implied, stated = hf_config["hidden_size"] // hf_config["num_attention_heads"], hf_config.get("head_dim")
    if stated in (None, implied):
        return None
    return f"it takes heads of hidden_size / num_attention_heads = {implied} dimensions, whatever head_dim = {stated} says"


ARCHITECTURE = text_family(
    "qwen2",
    ("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    refusal=_sglang_refusal,
    serves_windows=False,
)
