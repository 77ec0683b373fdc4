"""Rotation of the last dimensions of heads and compressed keys, in neighbouring pairs, which stay where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.rope import rotary_scale
from megarl.models.rope_frequencies import inverse_frequencies
from megarl.options.compressed_attention.sizes import CompressedSizes


class Waves(torch.nn.Module):
    """The frequencies `[rotated / 2]` of a layer, and the scale of its cosines and sines."""

    frequencies: Tensor

    def __init__(self, sizes: CompressedSizes, *, compressed: bool) -> None:
        super().__init__()
        config = sizes.compressed_rope if compressed else sizes.rope
        self.scale = rotary_scale(config, sizes.head_dim)
        self.register_buffer("frequencies", inverse_frequencies(config, sizes.head_dim), persistent=False)

    def rotated(self, heads: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """`[n, ..., d]` at `positions` `[n]`; `back`: the other way round."""
        exact = torch.promote_types(heads.dtype, torch.float32)
        angles = (positions[:, None].float() * self.frequencies.float()).view(len(heads), *[1] * (heads.dim() - 2), -1)
        cos, sin = ((wave * self.scale).to(heads.dtype).to(exact) for wave in (angles.cos(), angles.sin()))
        sin = -sin if back else sin
        still, turning = heads.split([heads.shape[-1] - 2 * angles.shape[-1], 2 * angles.shape[-1]], dim=-1)
        first, second = turning.to(exact).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        return torch.cat([still, turned.to(heads.dtype)], dim=-1)
