"""The layout of a quantised weight's parts over tensors and ranks: scales of blocks, columns in groups. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.errors import LayoutError
from megarl.models.packings import FP8_BLOCK, Packing, RowRange


@dataclass(frozen=True)
class _BesideWeight:
    of: Packing

    @property
    def tp_axis(self) -> int | None:
        return self.of.tp_axis

    def followed(self, part: int) -> tuple[Packing, int]:
        """The same tensor of the weight."""
        return self.of, part


@dataclass(frozen=True)
class BlockScales(_BesideWeight):
    """The scales of a parameter laid out by `of`, a row and a column for each block of 128 x 128.

    A block may lie on several ranks, which all know its scale (`options/few_bits/quantise.py`); so that each is sent once,
    a rank's shard are those of the blocks that begin in its part.
    """

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of each tensor."""
        return tuple(tuple(map(blocks_in, shape)) for shape in self.of.hf_shapes)

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The blocks that begin in the rank's part."""
        return [(part, blocks_in(start), blocks_in(stop)) for part, start, stop in self.of.runs(tp_rank, tp_size, padded_vocab)]

    def held(self, start: int, stop: int, part: int, name: str) -> tuple[int, int]:
        """The blocks of `start:stop` of the weight, along the axis that is split, which a rank of an engine holds.

        Raises:
            LayoutError: it does not end where a block does, which SGLang refuses, too.
        """
        length = self.of.hf_shapes[part][self.of.tp_axis or 0]
        if start % FP8_BLOCK or (stop % FP8_BLOCK and stop != length):
            raise LayoutError(
                f"a rank of the engine would hold {start} to {stop} of '{name}', but FP8 weights are shared in whole blocks of "
                f"{FP8_BLOCK}; use a smaller target tp"
            )
        return start // FP8_BLOCK, blocks_in(stop)


@dataclass(frozen=True)
class GroupedColumns(_BesideWeight):
    """What a parameter laid out by `of` has one of for each `per` of its columns: packed integers, or the scales of groups.

    `group` columns of a row share a scale, and a rank holds whole groups: it quantises what it has without the others.
    """

    per: int
    group: int

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors, with fewer columns."""
        return tuple((rows, cols // self.per) for rows, cols in self.of.hf_shapes)

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The runs of the parameter, by its rows or in columns of its own.

        Raises:
            LayoutError: the ranks would share a group.
        """
        runs = self.of.runs(tp_rank, tp_size, padded_vocab)
        if self.tp_axis != 1:
            return runs
        if any(start % self.group or stop % self.group for _, start, stop in runs):
            width = self.of.hf_shapes[0][1]
            raise LayoutError(
                f"{tp_size} ranks would share a linear layer's input width of {width} inside groups of {self.group} numbers "
                f"with one scale; each rank's share must be a multiple of {self.group}"
            )
        return [(part, start // self.per, stop // self.per) for part, start, stop in runs]

    def held(self, start: int, stop: int, part: int, name: str) -> tuple[int, int]:
        """The part that belongs to `start:stop` of the weight, along the axis that is split, which a rank of an engine holds.

        Raises:
            LayoutError: it does not end where a group does.
        """
        if self.tp_axis != 1:
            return start, stop
        if start % self.group or stop % self.group:
            raise LayoutError(
                f"a rank of the engine would hold columns {start} to {stop} of '{name}', but {self.group} columns share a "
                "scale; use a smaller target tp"
            )
        return start // self.per, stop // self.per


@dataclass(frozen=True)
class WeightShapes:
    """Rows and columns of each tensor of a parameter laid out by `of`, as two whole numbers that every rank knows."""

    of: Packing

    @property
    def tp_axis(self) -> None:
        """They are not split."""
        return

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Two numbers for each tensor."""
        return ((2,),) * len(self.of.hf_shapes)

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """All of them, tensor after tensor."""
        return [(part, 0, 2) for part in range(len(self.of.hf_shapes))]


def blocks_in(size: int) -> int:
    """Number of blocks of `FP8_BLOCK` that `size` rows or columns have a part of."""
    return -(-size // FP8_BLOCK)
