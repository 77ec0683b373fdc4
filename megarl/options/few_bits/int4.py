"""INT4 weights of experts: whole numbers from -7 to 7 times a bfloat16 scale for each group of columns of a row.

Stored as compressed-tensors' `pack-quantized` has it: eight numbers plus 8 in an int32, the first in its low bits. A scale maps
the group's largest magnitude to 7, so that quantising what was read, in float32, gives the same bytes again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.options.few_bits.formats import PER_WORD

LARGEST = 7
_OFFSET = 8


def quantise_rows(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rows `[R, C]`, C a multiple of `group`, to int8 `[R, C]` in -7 to 7 and bfloat16 scales `[R, C / group]`.

    Numbers are those nearest to the value over the rounded scale, even ones where two are. A group of zeros has scale 1.
    """
    groups = rows.detach().float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(2) / LARGEST).bfloat16()
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    numbers = (groups / scales.float()[..., None]).round().clamp(-LARGEST, LARGEST)
    return numbers.to(torch.int8).flatten(1), scales


def dequantise_rows(numbers: Tensor, scales: Tensor) -> Tensor:
    """float32 `[R, C]` of whole numbers `[R, C]` and the scales of their groups."""
    group = numbers.shape[1] // scales.shape[1]
    return (numbers.float().unflatten(1, (-1, group)) * scales.float()[..., None]).flatten(1)


def packed(numbers: Tensor) -> Tensor:
    """int8 `[R, C]`, C a multiple of 8, as int32 `[R, C / 8]`."""
    words = (numbers.int() + _OFFSET).unflatten(1, (-1, PER_WORD))
    shifts = 4 * torch.arange(PER_WORD, dtype=torch.int32, device=numbers.device)
    return (words << shifts).sum(2, dtype=torch.int32)


def unpacked(words: Tensor) -> Tensor:
    """int8 `[R, C]` of int32 `[R, C / 8]`."""
    shifts = 4 * torch.arange(PER_WORD, dtype=torch.int32, device=words.device)
    return (((words[..., None] >> shifts) & 0xF) - _OFFSET).to(torch.int8).flatten(1)


class _Rounded(torch.autograd.Function):
    """A weight as it is after quantising; its gradient is that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: int) -> Tensor:
        return dequantise_rows(*quantise_rows(weight, group)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


def fake_quantised(weight: Tensor, group: int) -> Tensor:
    """The weights that an engine computes with for `weight` `[R, C]`, in the weight's dtype, with the gradient of
    `weight` itself.

    The straight-through estimator (arXiv 1308.3432): rounding is taken for the identity in the backward pass.
    """
    rounded: Tensor = _Rounded.apply(weight, group)  # type: ignore[no-untyped-call]
    return rounded
