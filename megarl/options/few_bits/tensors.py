"""Whole weights to the tensors that a format stores them as, and back, by name: what conversion, export and engines share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megarl.models.weight_formats import NumberFormat
from megarl.options.few_bits import fp8_blocks, int4, mxfp4, mxfp8
from megarl.options.few_bits.formats import FewBits


def stored_rows(rows: Tensor, format: FewBits) -> tuple[Tensor, Tensor]:
    """Values and scales of rows of a weight (of `fp8-block`: of whole blocks of rows, with scales as floats)."""
    if format.name == "fp8-block":
        return fp8_blocks.quantise_rows(rows)
    if format.name == "mxfp8":
        return mxfp8.quantise_rows(rows)
    numbers, scales = int4.quantise_rows(rows, format.group)
    return int4.packed(numbers), scales


def dequantised(values: Tensor, scales: Tensor, format: NumberFormat, start: int = 0) -> Tensor:
    """The float32 rows (bfloat16, of MXFP4) from `start` on that `values` stand for; `scales` are those of the whole weight."""
    if format.name == "fp8-block":
        return fp8_blocks.dequantise_rows(values, scales, start)
    row_scales = scales[start : start + len(values)]
    if format.name == "mxfp8":
        return mxfp8.dequantise_rows(values, row_scales)
    if format.name == "mxfp4":
        return mxfp4.dequantised(values.unflatten(1, (row_scales.shape[1], -1)), row_scales)
    return int4.dequantise_rows(int4.unpacked(values), row_scales)


class Dequantiser:
    """Puts weights together of the stored tensors that come one by one, in any order, and gives what they stand for.

    A tensor that comes again takes the place of the last one, beside those that came with it.
    """

    def __init__(self, format: FewBits, is_weight: Callable[[str], bool]) -> None:
        """`is_weight`: whether the model has a weight of this name that is stored quantised."""
        self._format, self._is_weight = format, is_weight
        self._parts: dict[str, dict[str, Tensor]] = {}

    def forget(self) -> None:
        """Drop what has come."""
        self._parts.clear()

    def take(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """The weight that is complete with this tensor, and its float32 values; None: something is missing.

        Any other tensor is given back as it is.
        """
        places = ((name.removesuffix(suffix), suffix) for suffix in self._format.suffixes if name.endswith(suffix))
        base, suffix = next((pair for pair in places if self._is_weight(pair[0])), (name, None))
        if suffix is None:
            return name, tensor
        parts = self._parts.setdefault(base, {})
        parts[suffix] = tensor.detach().clone()
        if len(parts) < len(self._format.suffixes):
            return None
        values, scales, *_ = (parts[suffix] for suffix in self._format.suffixes)
        return base, dequantised(values, scales, self._format)
