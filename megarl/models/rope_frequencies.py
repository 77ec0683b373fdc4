"""The frequencies of rotary embeddings, as transformers computes them.

megatron-core's own scaling of Llama 3 has three of its parameters built in, so the model's rotary embedding is given the
frequencies computed here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megarl.models.rope import Llama3Scaling, LongRope, Rope, Yarn, scaling_of


def inverse_frequencies(hf_config: dict[str, Any], head_dim: int) -> Tensor:
    """The angle per position of each pair of a head's dimensions that rotates, float32 `[rotated / 2]`.

    Raises:
        ModelError: the rotary embedding cannot be represented, or a parameter is missing or makes no sense.
    """
    rope = Rope.from_hf(hf_config)
    rotated = rope.rotated(head_dim)
    scaling = scaling_of(rope, hf_config, head_dim)
    if rope.kind == "proportional" and isinstance(
        scaling, float
    ):  # the pairs are those of the whole head, and the last ones do not turn
        turning = torch.arange(0, rotated, 2, dtype=torch.int64).float() / head_dim
        return torch.cat([1.0 / (rope.base**turning), torch.zeros((head_dim - rotated) // 2)]) / scaling
    frequencies = 1.0 / (rope.base ** (torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated))
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequencies, scaling)
    if isinstance(scaling, Yarn):
        return _yarn(frequencies, scaling, rope.base)
    return frequencies / (torch.tensor(scaling.short, dtype=torch.float32) if isinstance(scaling, LongRope) else scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    share_kept = ((scaling.positions / wavelengths - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies


def _yarn(frequencies: Tensor, yarn: Yarn, base: float) -> Tensor:
    rotated = 2 * len(frequencies)

    def place(turns: float) -> float:
        return rotated * math.log(yarn.positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(yarn.fast), place(yarn.slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low if high != low else 0.001
    share_kept = 1 - ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / yarn.factor + share_kept * frequencies
