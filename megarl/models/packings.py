"""Layouts of one Megatron parameter over Hugging Face tensors and TP ranks: copy, grouped QKV, gate-up, vocabulary.

A packing answers runs `(part, start, stop)`: rows `start:stop` of its `part`-th tensor, or of zeros where part is None,
which in this order are a rank's shard. The same runs serve reading and writing. Shapes are `[output, input]`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from megarl.errors import LayoutError

RowRange = tuple[int | None, int, int]

FP8_BLOCK = 128
"""Rows and columns of a block that shares a scale in an FP8 checkpoint."""
SCALE_SUFFIX = "_scale_inv"
"""Ending of the names of an FP8 checkpoint's scales."""


class Packing(Protocol):
    """The layout of one kind of parameter."""

    @property
    def tp_axis(self) -> int | None:
        """The axis that tensor parallelism splits; None if every rank holds the whole parameter."""

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The whole shape of each Hugging Face tensor."""

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The runs that make up the shard of `tp_rank` along the split axis (axis 0 if nothing is split)."""


@runtime_checkable
class BesideWeight(Protocol):
    """The packing of what lies beside a weight, such as its scales: an engine's ranks share it out as they do the weight."""

    def followed(self, part: int) -> tuple[Packing, int] | None:
        """The weight's packing and the tensor of it that the `part`-th follows; None: it has shares of its own."""

    def held(self, start: int, stop: int, part: int, name: str) -> tuple[int, int]:
        """The part that belongs to `start:stop` of the weight, along the axis that is split, which a rank of an engine holds.

        Raises:
            LayoutError: nothing belongs to just these.
        """


@dataclass(frozen=True)
class Copy:
    """One tensor, whole on every rank (`axis` None) or split evenly: 1 for a row-parallel linear layer."""

    shape: tuple[int, ...]
    axis: int | None = None

    @property
    def tp_axis(self) -> int | None:
        """The axis that tensor parallelism splits."""
        return self.axis

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The tensor's own shape."""
        return (self.shape,)

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The rank's even share."""
        if self.axis is None:
            return [(0, 0, self.shape[0])]
        share = _share(self.shape[self.axis], tp_size, "a linear layer's input width")
        return [(0, tp_rank * share, (tp_rank + 1) * share)]


@dataclass(frozen=True)
class GroupedQKV:
    """q, k and v projections interleaved per query group: the q heads of the group, its k head, its v head.

    A rank holds an even, contiguous share of that order. With more ranks than groups the share is a part of a group:
    megatron-core keeps no replica of k and v, it gathers the projection's output and picks its heads from it.
    `hidden_size` is None for the biases. `gated`: behind each head of q are as many rows of its gate, which a rank holds
    behind the q heads of the group. `gate_apart`: the gates are a tensor of their own instead, the fourth, with `gate_rows` for
    each head; 0: as many as the head has. `keys_as_values`: there is no v. `value_dim` is the width of a head of v; 0: as of k.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    hidden_size: int | None
    gated: bool = False
    gate_apart: bool = False
    gate_rows: int = 0
    keys_as_values: bool = False
    value_dim: int = 0
    tp_axis: ClassVar[int] = 0

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of q, k and v, and of the gates where they are apart."""
        columns = () if self.hidden_size is None else (self.hidden_size,)
        of_group = [self.num_groups * width for width in self._of_group]
        of_gates = self.num_heads * self._gate_rows
        if self.gate_apart:
            rows_in_all = [self.num_heads * self.head_dim, *of_group, of_gates]
        else:
            rows_in_all = [self.num_heads * self.head_dim + of_gates, *of_group]
        return tuple((rows, *columns) for rows in rows_in_all)

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The rank's window of the interleaved order."""
        _share(self.num_heads, tp_size, "num_attention_heads")
        if self.num_groups % tp_size and tp_size % self.num_groups:
            raise LayoutError(f"tp is {tp_size}; it must divide num_key_value_heads={self.num_groups} or be a multiple of it")
        heads_per_group = self.num_heads // self.num_groups
        whole: list[RowRange] = []
        for group in range(self.num_groups):
            whole += self._queries(group * heads_per_group, heads_per_group)
            whole += [(part, group * width, (group + 1) * width) for part, width in enumerate(self._of_group, 1)]
        rows_in_all = self.num_heads * (self.head_dim + self._gate_rows) + self.num_groups * sum(self._of_group)
        share = _share(rows_in_all, tp_size, "the rows of q, k and v")
        return list(_clip_ranges(whole, tp_rank * share, (tp_rank + 1) * share))

    @property
    def _of_group(self) -> tuple[int, ...]:
        """Width of a head of k, and of one of v if there are some."""
        return (self.head_dim,) if self.keys_as_values else (self.head_dim, self.value_dim or self.head_dim)

    @property
    def _gate_rows(self) -> int:
        return (self.gate_rows or self.head_dim) if self.gated or self.gate_apart else 0

    def _queries(self, first: int, heads: int) -> Iterable[RowRange]:
        """The q heads from `first` on, then their gates."""
        if self.gate_apart:
            return [
                (part, first * of_head, (first + heads) * of_head)
                for part, of_head in ((0, self.head_dim), (3, self._gate_rows))
            ]
        if not self.gated:
            return [(0, first * self.head_dim, (first + heads) * self.head_dim)]
        starts = [(2 * head + gate) * self.head_dim for gate in (0, 1) for head in range(first, first + heads)]
        return [(0, start, start + self.head_dim) for start in starts]


@dataclass(frozen=True)
class GateUp:
    """A gated MLP's first layer: a rank's share of the gate, then its share of up; `hidden_size` is None for the biases."""

    ffn_size: int
    hidden_size: int | None
    tp_axis: ClassVar[int] = 0

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of gate and up."""
        shape = (self.ffn_size,) if self.hidden_size is None else (self.ffn_size, self.hidden_size)
        return (shape, shape)

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The same rows of both halves."""
        share = _share(self.ffn_size, tp_size, "intermediate_size")
        return [(part, tp_rank * share, (tp_rank + 1) * share) for part in (0, 1)]


@dataclass(frozen=True)
class HeadSection:
    """Rows that are alike: `rows` for each unit, the first unit's from row `first` of the `part`-th tensor on, the next one's
    `stride` rows further. `name` is what megatron-core's checkpoints add to the parameter's key. `units`: None means as many
    as the other sections have."""

    name: str
    part: int
    first: int
    rows: int
    stride: int
    units: int | None = None


@dataclass(frozen=True)
class Sections:
    """Sections one after the other; of each a rank has its share of the `units`, which are heads. Checkpoints of megatron-core
    store each section as a tensor of its own."""

    hf_shapes: tuple[tuple[int, ...], ...]
    units: int
    sections: tuple[HeadSection, ...]
    tp_axis: ClassVar[int] = 0

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The rank's units of every section."""
        row_ranges: list[RowRange] = []
        for section in self.sections:
            share = _share(section.units or self.units, tp_size, "the heads of linear attention")
            first, last = tp_rank * share, (tp_rank + 1) * share
            if section.stride == section.rows:  # next to each other
                row_ranges.append((section.part, section.first + first * section.rows, section.first + last * section.rows))
                continue
            starts = (section.first + unit * section.stride for unit in range(first, last))
            row_ranges += [(section.part, start, start + section.rows) for start in starts]
        return row_ranges


def padded_vocab(vocab_size: int, tp: int) -> int:
    """The vocabulary as training ranks hold it: rounded up so that `tp` divides it."""
    return -(-vocab_size // tp) * tp


@dataclass(frozen=True)
class Vocabulary:
    """Embedding or output layer: rows are token ids, followed by rows of zeros up to the padded vocabulary."""

    vocab_size: int
    hidden_size: int
    tp_axis: ClassVar[int] = 0

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape without padding."""
        return ((self.vocab_size, self.hidden_size),)

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The rank's ids, and zeros for those from `vocab_size` on."""
        padded = self.vocab_size if padded_vocab is None else padded_vocab
        if padded < self.vocab_size:
            raise LayoutError(f"padded_vocab is {padded}; it must be at least the model's vocab_size={self.vocab_size}")
        share = _share(padded, tp_size, "the padded vocabulary")
        whole: list[RowRange] = [(0, 0, self.vocab_size), (None, 0, padded - self.vocab_size)]
        return list(_clip_ranges(whole, tp_rank * share, (tp_rank + 1) * share))


def _share(total: int, tp_size: int, what: str) -> int:
    if total % tp_size:
        raise LayoutError(f"tp is {tp_size}; it must divide {what}, which is {total}")
    return total // tp_size


def _clip_ranges(runs: Iterable[RowRange], low: int, high: int) -> Iterable[RowRange]:
    """The part `low:high` of concatenated runs."""
    offset = 0
    for part, start, stop in runs:
        first, last = max(low, offset), min(high, offset + stop - start)
        if first < last:
            yield part, start + first - offset, start + last - offset
        offset += stop - start
