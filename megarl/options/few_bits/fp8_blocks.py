"""FP8 weights with a scale for each block of 128 x 128, as DeepSeek-V3 and transformers' FineGrainedFP8 store them.

A weight is `float8_e4m3fn`, its `weight_scale_inv` float32 `[rows / 128, cols / 128]` rounded up; the value is their product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.models.packings import FP8_BLOCK

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks of rows `[R, C]` to float8_e4m3fn `[R, C]` and their scales, float32 `[ceil(R/128), ceil(C/128)]`.

    A block's scale maps its largest magnitude to the largest float8, 448; a block of zeros has scale 1.
    """
    blocks = as_blocks(rows, 0, 0)
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    return in_float8(blocks, scales, 0, 0, rows.shape), scales


def as_blocks(part: Tensor, top: int, left: int) -> Tensor:
    """`part` in float32 as `[blocks, 128, blocks, 128]`, with zeros where its first and last blocks reach beyond it.

    It begins `top` rows and `left` columns behind the corner of its first block.
    """
    rows, cols = part.shape
    padded = torch.nn.functional.pad(part.float(), (left, -(left + cols) % FP8_BLOCK, top, -(top + rows) % FP8_BLOCK))
    return padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)


def in_float8(blocks: Tensor, scales: Tensor, top: int, left: int, shape: Sequence[int]) -> Tensor:
    """The part of this shape that `as_blocks` made `blocks` of, over their `scales`, as float8_e4m3fn."""
    values = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
    whole = values.view(values.shape[0] * FP8_BLOCK, values.shape[2] * FP8_BLOCK)
    return whole[top : top + shape[0], left : left + shape[1]].to(torch.float8_e4m3fn)


def dequantise_rows(rows: Tensor, scales: Tensor, start: int) -> Tensor:
    """Rows `start:start + R` of a quantised matrix, `[R, C]`, times all its `scales`, to float32."""
    height, width = rows.shape
    of_rows = scales[torch.arange(start, start + height) // FP8_BLOCK]
    return rows.float() * of_rows.repeat_interleave(FP8_BLOCK, dim=1)[:, :width]
