"""Attention whose scores are all there at once: with sinks, or with scores that are capped."""

from __future__ import annotations

import torch
from torch import Tensor


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float | None,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    """`[B, heads, R, v]`: as scaled_dot_product_attention, with scores below `cap` (Gemma 2), and with one more key whose value
    is zero and whose score is the head's of `sinks` (gpt-oss)."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if bias is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    else:
        scores = scores + bias
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype) @ value
    of_sinks = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, of_sinks], dim=-1).softmax(dim=-1)[..., :-1] @ value
