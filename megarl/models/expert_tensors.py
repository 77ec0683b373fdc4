"""Tensors that a hub checkpoint stores together, of experts or row by row: each read out of them, and all written into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.fused_experts import ExpertPlace, FusedExperts
from megarl.models.fused_rows import FusedRows, MatrixPlace


def joined(fused: FusedExperts | FusedRows, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the hub has them, with those in one that it stores together; they may come in any order.

    What is not complete is held, in main memory: a few tensors where those of a layer come one after another.

    Raises:
        ModelError: a part is missing.
    """
    pending: dict[str, tuple[Tensor, set[str]]] = {}
    for name, tensor in tensors:
        place = fused.place(name)
        if place is None:
            yield name, tensor
            continue
        if place.stored not in pending:
            whole = torch.empty(fused.shape(place.stored), dtype=tensor.dtype)
            pending[place.stored] = whole, set(fused.names_of(place.stored))
        whole, missing = pending[place.stored]
        if isinstance(place, MatrixPlace):
            whole.flatten(0, -2)[place.start : place.stop] = tensor
        elif not fused.transposed:  # type: ignore[union-attr]
            whole[place.expert, place.start : place.stop] = tensor
        else:
            whole[place.expert, ..., place.start : place.stop : place.step] = tensor.mT if tensor.dim() == 2 else tensor
        missing.discard(name)
        if not missing:
            yield place.stored, whole
            del pending[place.stored]
    for stored, (_, missing) in pending.items():
        raise ModelError(f"'{stored}' cannot be written without '{min(missing)}'")


class ExpertSlice:
    """An expert's tensor in a stored one, read when it is indexed; as a safetensors slice."""

    def __init__(self, source: Any, place: ExpertPlace, *, as_on_the_hub: bool) -> None:
        self.source, self.place, self.as_on_the_hub = source, place, as_on_the_hub
        _, *matrix = source.get_shape()
        self.widths = matrix[:-1] if as_on_the_hub else matrix[1:]

    def get_shape(self) -> list[int]:
        """Rows and columns; a bias has no columns."""
        return [self.place.rows, *self.widths]

    def __getitem__(self, key: Any) -> Tensor:
        """`[a:b]`, `[:, a:b]`, `[:]` or `[...]`."""
        rows, columns = _rows_and_columns(key)
        first, last, _ = rows.indices(self.place.rows)
        step = self.place.step
        box = slice(self.place.start + first * step, min(self.place.start + last * step, self.place.stop))
        if not self.widths:
            bias: Tensor = self.source[self.place.expert, box]
            return bias[::step].contiguous()
        if self.as_on_the_hub:
            block: Tensor = self.source[self.place.expert, columns, box]
            return block[:, ::step].T.contiguous()
        return self.source[self.place.expert, box, columns]


class RowSlice:
    """A tensor in a stored one, read when it is indexed; as a safetensors slice."""

    def __init__(self, source: Any, place: MatrixPlace) -> None:
        self.source, self.place = source, place

    def get_shape(self) -> list[int]:
        """Rows and columns."""
        return [self.place.stop - self.place.start, self.source.get_shape()[-1]]

    def __getitem__(self, key: Any) -> Tensor:
        """`[a:b]`, `[:, a:b]`, `[:]` or `[...]`."""
        rows, columns = _rows_and_columns(key)
        first, last, _ = rows.indices(self.place.stop - self.place.start)
        start, last = self.place.start + first, self.place.start + last
        if len(shape := self.source.get_shape()) == 3:  # a stack of matrices, of which this is part of one
            matrix, start, last = start // shape[1], start % shape[1], start % shape[1] + last - start
            block: Tensor = self.source[matrix, start:last, columns]
            return block
        rows_of_one: Tensor = self.source[start:last, columns]
        return rows_of_one


def _rows_and_columns(key: Any) -> list[Any]:
    indices = () if key is ... else key if isinstance(key, tuple) else (key,)
    return [*indices, slice(None), slice(None)][:2]
