"""Matrices that a hub checkpoint stores one below another in one tensor: here each has its own name, as in other families.

Weight maps, runs, updates and conversions know q, k, v and gate, up. Names and rows are here, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.errors import ModelError


@dataclass(frozen=True)
class MatrixPlace:
    """A tensor is the rows `start:stop` of the tensor `stored`."""

    stored: str
    start: int
    stop: int


@dataclass(frozen=True)
class FusedRows:
    """Parts of each stored tensor, by the end of its name: the ends of its parts' names in that place, and their rows.

    All have `columns` columns.
    """

    parts: Mapping[str, tuple[tuple[str, int], ...]]
    columns: int

    def names_of(self, stored: str) -> list[str]:
        """The tensors in a stored one, from the first row on; any other tensor is itself."""
        for suffix, parts in self.parts.items():
            if stored.endswith(suffix):
                return [stored.removesuffix(suffix) + part for part, _ in parts]
        return [stored]

    def place(self, name: str) -> MatrixPlace | None:
        """The place of a tensor; None: it is stored by itself."""
        for suffix, parts in self.parts.items():
            start = 0
            for part, rows in parts:
                if name.endswith(part):
                    return MatrixPlace(name.removesuffix(part) + suffix, start, start + rows)
                start += rows
        return None

    def shape(self, stored: str) -> tuple[int, int]:
        """Shape of a stored tensor."""
        parts = next(parts for suffix, parts in self.parts.items() if stored.endswith(suffix))
        return sum(rows for _, rows in parts), self.columns

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
