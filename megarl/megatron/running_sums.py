"""Running sums that are the same in every run: on CUDA torch's `cumsum` of floats refuses `run.deterministic`."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 512
"""Numbers whose running sums are one product with a triangle of ones; those of longer rows are summed block by block."""


def running_sum(values: Tensor) -> Tensor:
    """Sums of finite floats `[..., N]` up to each, along the last axis; under deterministic algorithms by matrix products."""
    if not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(-1)
    length = values.shape[-1]
    if length <= BLOCK:
        return values @ torch.ones(length, length, dtype=values.dtype, device=values.device).triu()
    padded = torch.nn.functional.pad(values, (0, -length % BLOCK))
    inside = running_sum(padded.unflatten(-1, (-1, BLOCK)))
    blocks = inside[..., -1]
    return (inside + (running_sum(blocks) - blocks).unsqueeze(-1)).flatten(-2)[..., :length]
