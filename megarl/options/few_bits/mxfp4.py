"""MXFP4 experts of gpt-oss, read as bfloat16: numbers of four bits, with an exponent for each 32 of a row.

`blocks` uint8 `[E, R, C / 32, 16]` hold two numbers in a byte, the first in its low bits, `scales` uint8 `[E, R, C / 32]` their
exponents plus 127 (OCP Microscaling Formats 1.0, MXFP4). The hub's tensor that they stand for is `[E, C, R]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.fused_experts import BLOCKS, SCALES

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
_BIAS = 127


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 `[..., C]` of `blocks` `[..., C / 32, 16]` and `scales` `[..., C / 32]`."""
    numbers = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(_VALUES[numbers.int()], (scales.int() - _BIAS)[..., None])
    return values.flatten(-2)


@dataclass(frozen=True)
class Mxfp4:
    """A `NumberFormat` (models/weight_formats.py): a byte holds two values, and 32 values of a row have one exponent."""

    name: str = "mxfp4"
    rows_per_scale: int = 1

    def width(self, cols: int) -> int:
        """Values of a row of `cols` bytes."""
        return 2 * cols


class Mxfp4Tensor:
    """Blocks and scales as the hub's tensor `[E, C, R]`, dequantised when it is indexed; as a safetensors slice."""

    def __init__(self, blocks: Any, scales: Any, name: str) -> None:
        """Check their shapes.

        Raises:
            ModelError: they do not belong together.
        """
        self.blocks, self.scales = blocks, scales
        shape, of_scales = list(blocks.get_shape()), list(scales.get_shape())
        if len(shape) != 4 or shape[3] != 16 or shape[:3] != of_scales:
            raise ModelError(
                f"tensor '{name}{BLOCKS}' has shape {shape} and '{name}{SCALES}' {of_scales}; they must be [E, R, C, 16] and "
                "[E, R, C]"
            )

    def get_shape(self) -> list[int]:
        """Experts, columns and rows."""
        experts, rows, groups, _ = self.blocks.get_shape()
        return [experts, 32 * groups, rows]

    def __getitem__(self, key: tuple[int, slice, slice]) -> Tensor:
        """`[expert, a:b, c:d]`, of which only the rows `c:d` are read."""
        expert, columns, rows = key
        return dequantised(self.blocks[expert, rows], self.scales[expert, rows]).T[columns]
