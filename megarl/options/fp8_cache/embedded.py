"""The embedded engine's keys and values as a cache in FP8 gives them back: SGLang's numbers, but for its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from megarl.config import Config
from megarl.options.fp8_cache.checks import check_model
from megarl.options.fp8_cache.scales import key_bound, rounded, row_bound, scale_for
from megarl.options.fp8_cache.section import FP8, kv_cache_dtype_of

ATTENTION = "sdpa_with_fp8_cache"
SCALES = "kv_scales"
"""An attention's scales of its keys and values."""


def model_change(config: Config) -> Callable[[Any], None] | None:
    """Return the function that changes the model of a run's engines before they answer; None: none is needed."""
    if kv_cache_dtype_of(config.rollout) != FP8:
        return None
    check_model(config)
    return round_keys_and_values


def round_keys_and_values(model: Any) -> None:
    """Have the attention of a transformers model round its keys and values, all of them again with each token: what is rounded
    already stays as it is."""
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    length = float(model.model.rotary_emb.attention_scaling)
    for layer in model.model.layers:
        attention, norm = layer.self_attn, layer.input_layernorm.weight
        keys, values, key_norm = attention.k_proj, attention.v_proj, getattr(attention, "k_norm", None)
        of_keys = key_bound(keys.weight, norm, keys.bias, key_norm.weight if key_norm is not None else None, length)
        setattr(attention, SCALES, (scale_for(of_keys), scale_for(row_bound(values.weight, norm, values.bias))))
    model.set_attn_implementation(ATTENTION)


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any) -> Any:
    of_keys, of_values = getattr(module, SCALES)
    return sdpa_attention_forward(module, query, rounded(key, of_keys), rounded(value, of_values), attention_mask, **options)
