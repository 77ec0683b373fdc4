"""The roles that share prefixes by attention over segments, under layers whose own attention does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import AnyConfig
from megarl.config.questions import MEAN_SHARE
from megarl.models.flops import FlopsModel
from megarl.models.shape import ModelShape

NAME = "segments"
FP8_ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")
"""Fields of megatron-core's whose attention is Transformer Engine's alone."""
SEGMENTS_PER_SPEC = 2.0
"""How much longer attention by segments is assumed to take than Transformer Engine's own, pair for pair: torch has
FlashAttention 2, Transformer Engine 3. Not measured."""


def pays(config: AnyConfig, flops: FlopsModel) -> bool:
    """Return whether it pays for prompts and responses of half the lengths that the config allows."""
    group = config.sampling.samples_per_prompt if config.sampling is not None else 1
    prompt, response = (int(MEAN_SHARE * length) for length in config.longest_parts)
    return sharing_pays(flops, prompt, response, group)


def sharing_pays(flops: FlopsModel, prompt_tokens: int, response_tokens: int, group: int) -> bool:
    """Return whether a prompt computed once for a `group` of responses, by segments, takes less than one for each of them."""
    responses = [response_tokens] * group
    attention = flops.attention(0, prompt_tokens) + group * flops.attention(prompt_tokens, response_tokens)
    shared = flops.cost(prompt_tokens, responses) + (SEGMENTS_PER_SPEC - 1) * attention
    return shared < group * flops.cost(prompt_tokens, [response_tokens])


def fits(folder: str, platform: str, dtype: str, megatron: Mapping[str, Any]) -> bool:
    """Return whether it can compute the model in `folder` under these fields of megatron-core's.

    torch's flash attention takes 16-bit types and caps no scores, and megatron-core's latent attention counts positions itself.
    """
    shape = ModelShape.read(folder)
    if shape.latent or shape.traits.score_cap is not None or shape.traits.chunks or (platform == "cuda" and dtype == "float32"):
        return False
    return not any(megatron.get(field) for field in FP8_ATTENTION)
