"""Scales of keys and values in FP8 that no prompt can overflow, read off the weights.

E4M3 has four bits for the exponent: its error is a share of the number, from 2^-6 to 448, and beyond 448 a number is cut. So a
scale needs not fit closely, it must be large enough. What a linear layer makes of a norm's output is bounded by its weights:
a row `w` of it gives at most `sqrt(width) * |g * w| + |bias|`, `g` the norm's weights, as the numbers that these multiply have
a root mean square of at most 1. Rotation mixes two keys, so at most the root of 2 more; a norm of the keys bounds them
itself. `MARGIN` leaves room for training, as scales are constants of a server's graphs: they are made once, at its start.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST = 448.0
MARGIN = 2.0


def row_bound(weight: Tensor, norm: Tensor, bias: Tensor | None) -> float:
    """The largest number that a linear layer `weight` `[R, C]` makes of the output of an RMSNorm with weights `norm` `[C]`."""
    rows = (weight.detach().float() * norm.detach().float()).norm(dim=1) * math.sqrt(weight.shape[1])
    return float((rows if bias is None else rows + bias.detach().float().abs()).max())


def key_bound(weight: Tensor, norm: Tensor, bias: Tensor | None, key_norm: Tensor | None, length: float = 1.0) -> float:
    """The largest number of keys, after rotation; `key_norm` `[D]` are the weights of a norm of each head's keys, if any.

    `length`: what rotation multiplies by (YaRN's and LongRoPE's attention factor).
    """
    if key_norm is None:
        return length * math.sqrt(2) * row_bound(weight, norm, bias)
    return length * math.sqrt(len(key_norm)) * float(key_norm.detach().float().abs().max())


def scale_for(bound: float) -> float:
    """The power of two, at least 1, by which numbers of up to `bound` are divided before they are rounded to E4M3."""
    return 2.0 ** max(0, math.ceil(math.log2(MARGIN * bound / LARGEST))) if bound > 0 else 1.0


def rounded(values: Tensor, scale: float) -> Tensor:
    """`values` as a cache in E4M3 gives them back, in their own dtype."""
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale
