"""FP8 weights with a scale for each block of 128 x 128, as DeepSeek-V3 and transformers' FineGrainedFP8 store them.

A weight is `float8_e4m3fn`, its `weight_scale_inv` float32 `[rows / 128, cols / 128]` rounded up; the value is their product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.packings import FP8_BLOCK

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks of rows `[R, C]` to float8_e4m3fn `[R, C]` and their scales, float32 `[ceil(R/128), ceil(C/128)]`.

    A block's scale maps its largest magnitude to the largest float8, 448; a block of zeros has scale 1.
    """
    height, width = rows.shape
    padded = torch.nn.functional.pad(rows.float(), (0, -width % FP8_BLOCK, 0, -height % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    values = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).view(padded.shape)[:height, :width]
    return values.to(torch.float8_e4m3fn), scales


def dequantise_rows(rows: Tensor, scales: Tensor, start: int) -> Tensor:
    """Rows `start:start + R` of a quantised matrix, `[R, C]`, times all its `scales`, to float32."""
    height, width = rows.shape
    of_rows = scales[torch.arange(start, start + height) // FP8_BLOCK]
    return rows.float() * of_rows.repeat_interleave(FP8_BLOCK, dim=1)[:, :width]
