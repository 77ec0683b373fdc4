"""The Hugging Face tensors of a model, numbered, as columns: which rule, layer and expert, and how large.

The order is that of `WeightMap.hf_names()`; names are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from megarl.models.weight_map import ITEMSIZE, Rule, WeightMap

Ints = npt.NDArray[np.int64]

NONE = -1
"""Layer of a tensor outside the layers, expert of one that is no expert's."""


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor seen as a matrix: a vector has one column, and all axes behind the first are columns."""
    return shape[0], prod(shape[1:])


@dataclass(frozen=True)
class TensorTable:
    """Columns with one entry per tensor. `rule` and `part` say which of whose tensors it is; `rows` and `cols` are the whole
    tensor's (`as_matrix`), `itemsize` the bytes of an element.
    """

    rules: tuple[Rule, ...]
    rule: Ints
    part: Ints
    layer: Ints
    expert: Ints
    rows: Ints
    cols: Ints
    itemsize: Ints

    def __len__(self) -> int:
        return len(self.rule)

    @classmethod
    def of(cls, weight_map: WeightMap, itemsize: int) -> TensorTable:
        """The tensors of a model whose elements have `itemsize` bytes, but for those of rules with a dtype of their own."""
        rules = tuple(rule for rule in weight_map.rules if not rule.tied_copy)
        columns: list[list[int]] = []
        for number, layer in _in_order(rules, weight_map.num_layers):
            rule = rules[number]
            size = ITEMSIZE[rule.dtype] if rule.dtype else itemsize
            shapes = [as_matrix(shape) for shape in rule.packing.hf_shapes]
            for expert in range(weight_map.num_experts) if rule.is_expert else (NONE,):
                columns += [[number, part, layer, expert, *shape, size] for part, shape in enumerate(shapes)]
        return cls(rules, *np.array(columns, dtype=np.int64).T.copy())

    @property
    def nbytes(self) -> Ints:
        """Bytes of each whole tensor."""
        return self.rows * self.cols * self.itemsize

    @cached_property
    def names(self) -> list[str]:
        """The Hugging Face name of each tensor."""
        return [self.rules[rule].hf_names[part].format(**indices) for rule, part, indices in self._places()]

    @cached_property
    def parameters(self) -> list[str]:
        """The Megatron parameter that each tensor is a part of (`WeightMap.rule_for` knows it)."""
        return [self.rules[rule].megatron_name.format(**indices) for rule, _, indices in self._places()]

    def _places(self) -> Iterator[tuple[int, int, dict[str, int]]]:
        columns = (self.rule.tolist(), self.part.tolist(), self.layer.tolist(), self.expert.tolist())
        for rule, part, layer, expert in zip(*columns, strict=True):
            yield rule, part, {"layer": layer, "expert": expert}


def _in_order(rules: tuple[Rule, ...], num_layers: int) -> Iterator[tuple[int, int]]:
    """(number of the rule, layer) of every parameter (of every expert together), as `WeightMap.bound_rules` has them."""
    for stage in ("first", "layer", "last"):
        numbers = [number for number, rule in enumerate(rules) if rule.stage == stage]
        for layer in range(num_layers) if stage == "layer" else (NONE,):
            yield from ((number, layer) for number in numbers if layer == NONE or rules[number].has_layer(layer))
