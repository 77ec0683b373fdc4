"""Windows of a model's layers, by megatron-core's config: those that slide, and chunks."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention


class ChunkWindow(int):
    """A window that does not slide: a token attends to those before it in its own chunk of so many tokens of its sequence."""

    __slots__ = ()


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Tokens of the window that a layer (counted from 1) attends through, itself included; None: it attends to all."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    tokens: int = config.window_size[0] + 1
    return ChunkWindow(tokens) if getattr(config, "windows_are_chunks", False) else tokens


def windows_of(config: TransformerConfig) -> frozenset[int | None]:
    """Windows of all layers but those with an attention variant."""
    freq: Any = config.linear_attention_freq or [0] * config.num_layers
    return frozenset(window_of(config, number + 1) for number in range(config.num_layers) if not freq[number])
