"""The content of every rank of an engine of every tensor, as columns: the goal that a plan is measured against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.tensors import Ints, TensorTable, as_matrix


@dataclass(frozen=True)
class Slices:
    """Columns with one entry per tensor and rank that is sent some of it: the box `row, col, rows, cols` of the whole tensor.

    `engine_rank` is `EVERY_RANK` of a tensor that all ranks take whole.
    """

    tensor: Ints
    engine_rank: Ints
    row: Ints
    rows: Ints
    col: Ints
    cols: Ints

    def __len__(self) -> int:
        return len(self.tensor)


def engine_slices(tensors: TensorTable, target: EngineTarget, num_experts: int) -> Slices:
    """The slices that each rank of an engine is sent, sorted by tensor and rank; without the vocabulary's padding."""
    tables = []
    for number, rule in enumerate(tensors.rules):
        axis = rule.packing.tp_axis
        of_rule = np.flatnonzero(tensors.rule == number)
        for part, shape in enumerate(rule.packing.hf_shapes):
            of_part = of_rule[tensors.part[of_rule] == part]
            low, high = np.array(target.intervals(rule, part), np.int64).T
            member = np.flatnonzero(high > low)
            whole = np.zeros_like(member), np.full_like(member, as_matrix(shape)[0 if axis == 1 else 1])
            along = low[member], high[member] - low[member]
            box = (*whole, *along) if axis == 1 else (*along, *whole)
            tensor = np.repeat(of_part, len(member))
            first = target.first_ranks(rule, tensors.expert[tensor], num_experts)
            tables.append(np.stack([tensor, first + np.tile(member, len(of_part)), *(np.tile(c, len(of_part)) for c in box)]))
    columns = np.concatenate(tables, axis=1)
    return Slices(*columns[:, np.lexsort((columns[1], columns[0]))])
