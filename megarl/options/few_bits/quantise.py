"""Weights in few bits, made where they lie: on each rank's shard, and bit for bit as of the whole tensor.

Of FP8 with a scale per block of 128 x 128 only the blocks' largest magnitudes are exchanged, one float for 16,384 weights:
a block may reach over several shards. Groups of columns lie on one rank each, which exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.models.packings import FP8_BLOCK, SCALE_SUFFIX
from megarl.models.weight_map import BoundRule
from megarl.options.few_bits.formats import FewBits, rule_of_part
from megarl.options.few_bits.fp8_blocks import LARGEST, as_blocks, in_float8
from megarl.options.few_bits.packings import BlockScales, blocks_in
from megarl.options.few_bits.tensors import stored_rows

Scales = Literal["float", "power_of_two"]
Exchange = Callable[[Tensor], None]
"""Replaces a tensor, in place, by the element-wise largest of all ranks that hold a part of the parameter."""


@dataclass(frozen=True)
class MatrixBox:
    """Rows `row:+rows` and columns `col:+cols` of a whole matrix."""

    row: int
    col: int
    rows: int
    cols: int

    @property
    def blocks(self) -> tuple[slice, slice]:
        """The blocks that it has a part of."""
        rows = slice(self.row // FP8_BLOCK, blocks_in(self.row + self.rows))
        return rows, slice(self.col // FP8_BLOCK, blocks_in(self.col + self.cols))

    @property
    def behind_corner(self) -> tuple[int, int]:
        """Rows and columns by which it begins behind the corner of its first block."""
        return self.row % FP8_BLOCK, self.col % FP8_BLOCK


@dataclass(frozen=True)
class FormatQuantiser:
    """`megatron.weights.Quantiser` for the folders that SGLang reads (`options/few_bits/formats.py`)."""

    format: FewBits

    def applies_to(self, rule: BoundRule) -> bool:
        """Return whether the format quantises the parameter."""
        return self.format.applies_to(rule.megatron_name)

    def rules(self, rule: BoundRule) -> list[BoundRule]:
        """Rules of the tensors as which the parameter is stored, each tensor of it as a parameter of its own."""
        return [rule_of_part(rule, part) for part in self.format.parts(rule.packing)]

    def __call__(self, rule: BoundRule, shard: Tensor, tp_rank: int, tp_size: int, exchange: Exchange) -> dict[str, Tensor]:
        """This rank's shard of each of `rules(rule)`, by its Megatron name."""
        name = rule.megatron_name
        if self.format.name == "fp8-block":
            in_blocks, all_scales = quantise_shard(rule, shard, tp_rank, tp_size, exchange, self.format.scales)
            return {name: in_blocks, name + SCALE_SUFFIX: _own_scales(rule, all_scales, tp_rank, tp_size)}
        for part in self.rules(rule):
            part.pieces(tp_rank, tp_size)  # raises LayoutError where ranks would share a group
        parts: tuple[Tensor, ...] = stored_rows(shard, self.format)
        if self.format.name == "int4":
            parts = *parts, torch.tensor([size for shape in rule.hf_shapes.values() for size in shape], device=shard.device)
        return {name + suffix: part for suffix, part in zip(self.format.suffixes, parts, strict=True)}

    def agreed(self, rule: BoundRule, shard: Tensor, tp_rank: int, tp_size: int, exchange: Exchange) -> Tensor | None:
        """The largest magnitudes of all blocks of a parameter, one behind the other, if its ranks exchange them."""
        if self.format.name != "fp8-block" or rule.tp_axis is None or tp_size == 1:
            return None
        flat = torch.cat([values.flatten() for values in _largest(rule, shard, _parts(rule, shard, tp_rank, tp_size)).values()])
        exchange(flat)
        return flat


def _own_scales(rule: BoundRule, scales: dict[str, Tensor], tp_rank: int, tp_size: int) -> Tensor:
    """Scales of the blocks that begin in this rank's part: together the ranks have each scale once."""
    axis, of_tensors = rule.tp_axis or 0, [scales[name + SCALE_SUFFIX] for name in rule.hf_names]
    runs = BlockScales(rule.packing).runs(tp_rank, tp_size, None)
    return torch.cat(
        [of_tensors[part].narrow(axis, start, stop - start) for part, start, stop in runs if part is not None], axis
    )


def raise_to_largest(largest: Tensor, part: Tensor, box: MatrixBox) -> None:
    """Raise float32 `largest`, an entry per block of a whole matrix, to the magnitudes in `part`, which lies at `box` of it."""
    if part.numel():
        of_box = largest[box.blocks]
        torch.maximum(of_box, as_blocks(part, *box.behind_corner).abs().amax((1, 3)), out=of_box)


def scales_of(largest: Tensor, kind: Scales) -> Tensor:
    """A scale for each block, which maps its largest magnitude to the largest float8 or, rounded up to a power of two, below.

    A block of zeros has scale 1.
    """
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    if kind == "power_of_two":
        mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1): exactly 0.5 is a power of two already
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return scales


def quantise_part(part: Tensor, box: MatrixBox, scales: Tensor) -> Tensor:
    """`part`, which lies at `box` of a matrix with these `scales`, as float8_e4m3fn of the same shape."""
    if not part.numel():
        return part.to(torch.float8_e4m3fn)
    return in_float8(as_blocks(part, *box.behind_corner), scales[box.blocks], *box.behind_corner, part.shape)


def quantise_shard(
    rule: BoundRule, shard: Tensor, tp_rank: int, tp_size: int, exchange: Exchange, kind: Scales = "float"
) -> tuple[Tensor, dict[str, Tensor]]:
    """One rank's shard of a linear layer's weight in float8, and the scales of the whole Hugging Face tensors it is a part of.

    Collective over the ranks that hold the parameter. `hf_from_shards` makes the whole tensors of the float8 shards.
    Scales are float32 `[ceil(rows / 128), ceil(cols / 128)]` under the name that FP8 checkpoints give them.
    """
    parts = list(_parts(rule, shard, tp_rank, tp_size))
    largest = _largest(rule, shard, parts)
    if rule.tp_axis is not None and tp_size > 1:
        flat = torch.cat([values.flatten() for values in largest.values()])
        exchange(flat)
        pieces = flat.split([values.numel() for values in largest.values()])
        largest = {name: piece.view_as(largest[name]) for name, piece in zip(largest, pieces, strict=True)}
    scales = {name: scales_of(values, kind) for name, values in largest.items()}
    quantised = [quantise_part(part, box, scales[name]) for name, box, part in parts]
    return torch.cat(quantised, dim=rule.tp_axis or 0), {name + SCALE_SUFFIX: values for name, values in scales.items()}


def _largest(rule: BoundRule, shard: Tensor, parts: Iterable[tuple[str, MatrixBox, Tensor]]) -> dict[str, Tensor]:
    """The largest magnitudes in the blocks of each Hugging Face tensor, of the `parts` in this shard."""
    largest = {name: torch.zeros(*map(blocks_in, shape), device=shard.device) for name, shape in rule.hf_shapes.items()}
    for name, box, part in parts:
        raise_to_largest(largest[name], part, box)
    return largest


def _parts(rule: BoundRule, shard: Tensor, tp_rank: int, tp_size: int) -> Iterator[tuple[str, MatrixBox, Tensor]]:
    """The parts of a shard, in order along the axis that is split: of which tensor, where in it, and the values."""
    axis, offset, shapes = rule.tp_axis or 0, 0, rule.hf_shapes
    for piece in rule.pieces(tp_rank, tp_size):
        assert piece.hf_name is not None, "linear layers are not padded"
        length = piece.stop - piece.start
        rows, cols = shapes[piece.hf_name]
        box = MatrixBox(piece.start, 0, length, cols) if axis == 0 else MatrixBox(0, piece.start, rows, length)
        yield piece.hf_name, box, shard.narrow(axis, offset, length)
        offset += length
