"""Matrices that a hub checkpoint stores one below another in one tensor: here each has its own name, as in other families.

Weight maps, runs, updates and conversions know q, k, v and gate, up. Names and rows are here, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megarl.errors import ModelError


@dataclass(frozen=True)
class MatrixPlace:
    """A tensor is the rows `start:stop` of the tensor `stored`, counted through its matrices if it is a stack of some."""

    stored: str
    start: int
    stop: int


@dataclass(frozen=True)
class FusedRows:
    """Parts of each stored tensor, by the end of its name: the ends of its parts' names in that place, and their rows.

    All have `columns` columns, but for those in `stacks`: so many matrices `[n, rows / n, columns]` by the end of their name.
    """

    parts: Mapping[str, tuple[tuple[str, int], ...]]
    columns: int
    stacks: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def names_of(self, stored: str) -> list[str]:
        """The tensors in a stored one, from the first row on; any other tensor is itself."""
        for suffix, parts in self.parts.items():
            if stored.endswith(suffix):
                return [stored.removesuffix(suffix) + part for part, _ in parts]
        return [stored]

    def place(self, name: str) -> MatrixPlace | None:
        """The place of a tensor; None: it is stored by itself."""
        for start in (at + 1 for at, letter in enumerate(name) if letter == "."):
            if (within := self._places.get(name[start:])) is not None:
                return MatrixPlace(name[:start] + within.stored, within.start, within.stop)
        return None

    def rows(self, stored: str) -> int:
        """Rows of a stored tensor, of all its matrices."""
        return sum(rows for _, rows in self.parts[self._suffix(stored)])

    def is_stack(self, name: str) -> bool:
        """Return whether a tensor is a stack of matrices."""
        return name.endswith(tuple(self.stacks))

    def shape(self, stored: str) -> tuple[int, ...]:
        """Shape of a stored tensor."""
        rows, stack = self.rows(stored), self.stacks.get(self._suffix(stored))
        return (rows, self.columns) if stack is None else (stack[0], rows // stack[0], stack[1])

    def _suffix(self, stored: str) -> str:
        return next(suffix for suffix in self.parts if stored.endswith(suffix))

    @cached_property
    def _places(self) -> dict[str, MatrixPlace]:
        """By the end of a part's name, its place in what has the end `stored`."""
        places = {}
        for suffix, parts in self.parts.items():
            start = 0
            for part, rows in parts:
                places[part] = MatrixPlace(suffix, start, start + rows)
                start += rows
        return places

    def check(self, stored: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless a stored tensor has the shape that the config implies."""
        if tuple(shape) != self.shape(stored):
            raise ModelError(f"tensor '{stored}' has shape {list(shape)}, but config.json implies {list(self.shape(stored))}")


def gate_over_up(ffn_size: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """The gate and up projection of an MLP in one tensor."""
    return {"mlp.gate_up_proj.weight": (("mlp.gate_proj.weight", ffn_size), ("mlp.up_proj.weight", ffn_size))}


def queries_keys_values(query: int, key_value: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """The projections of queries, keys and values in one tensor, of these rows each."""
    rows = {"q": query, "k": key_value, "v": key_value}
    return {"self_attn.qkv_proj.weight": tuple((f"self_attn.{which}_proj.weight", n) for which, n in rows.items())}
