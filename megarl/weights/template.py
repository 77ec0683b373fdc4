"""Every transfer that one engine needs, as columns of numbers, sorted by source; the same for all engines and replicas.

Made a rule at a time: a rule's tensors are shared alike in every layer and by every expert, so its boxes are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megarl.errors import LayoutError
from megarl.models.weight_map import Rule
from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.sources import Sources, shard_runs
from megarl.weights.tensors import Ints, TensorTable, as_matrix


@dataclass(frozen=True)
class Transfers:
    """Columns with one entry per transfer: a box of a tensor, from a source's shard to a slice of a rank of the engine.

    `row, col, rows, cols` is the box in the whole tensor; it begins at `source_row, source_col` of the source's shard (the
    Megatron parameter, as a matrix) and at `target_row, target_col` of what the engine's rank holds of this tensor.
    `engine_rank` may be `EVERY_RANK`.
    """

    tensor: Ints
    source: Ints
    engine_rank: Ints
    row: Ints
    col: Ints
    rows: Ints
    cols: Ints
    source_row: Ints
    source_col: Ints
    target_row: Ints
    target_col: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.tensor)


def engine_transfers(
    tensors: TensorTable, sources: Sources, target: EngineTarget, padded_vocab: int, bucket_bytes: int
) -> Transfers:
    """All transfers of one engine, sorted by source, rank of the engine, tensor and row; none larger than `bucket_bytes`.

    `padded_vocab` is the vocabulary as the training ranks hold it.

    Raises:
        LayoutError: a layout does not divide a parameter, or a row of a tensor is larger than a bucket.
    """
    tables: list[dict[str, Ints]] = []
    for number, rule in enumerate(tensors.rules):
        of_rule = np.flatnonzero(tensors.rule == number)
        runs = shard_runs(rule, sources.layout, padded_vocab)
        for part in range(len(rule.hf_names)):
            of_part = of_rule[tensors.part[of_rule] == part]
            if len(of_part):
                boxes = _boxes(rule, part, [run for run in runs if run[1] == part], target)
                boxes = _cut(boxes, rule, part, int(tensors.itemsize[of_part[0]]), bucket_bytes)
                tables.append(_for_all(boxes, of_part, rule, tensors, sources, target))
    columns = {name: np.concatenate([each[name] for each in tables]) for name in tables[0]}
    columns["nbytes"] = columns["rows"] * columns["cols"] * tensors.itemsize[columns["tensor"]]
    order = np.lexsort([columns[name] for name in ("col", "row", "tensor", "engine_rank", "source")])
    return Transfers(**{name: column[order] for name, column in columns.items()})


def _boxes(rule: Rule, part: int, runs: Iterable[tuple[int, int, int, int, int]], target: EngineTarget) -> dict[str, Ints]:
    """The transfers of one tensor, with `slot` in place of the source and `member` for the rank, from the first holder on."""
    axis = rule.packing.tp_axis
    rows, cols = as_matrix(rule.packing.hf_shapes[part])
    boxes = []
    for member, (low, high) in enumerate(target.intervals(rule, part)):
        for slot, _, start, stop, offset in runs:
            first, last = max(low, start), min(high, stop)
            if first < last:
                along = (first, last - first, offset + first - start, first - low)
                box = (0, rows, 0, 0, *along) if axis == 1 else (*along, 0, cols, 0, 0)
                boxes.append((slot, member, *box))
            if axis is None:
                break  # every slot has all of it; which one sends is decided for each tensor
    columns = np.array(boxes, np.int64).reshape(-1, len(_BOX)).T
    return dict(zip(_BOX, columns, strict=True))


_BOX = (
    "slot", "member", "row", "rows", "source_row", "target_row", "col", "cols", "source_col", "target_col",
)  # fmt: skip


def _cut(boxes: dict[str, Ints], rule: Rule, part: int, itemsize: int, bucket_bytes: int) -> dict[str, Ints]:
    """The same boxes, those larger than a bucket cut into runs of rows."""
    row_bytes = boxes["cols"] * itemsize
    if row_bytes.max(initial=0) > bucket_bytes:
        raise LayoutError(
            f"bucket_bytes is {bucket_bytes}, but one row of '{rule.hf_names[part]}' has {row_bytes.max()} bytes; "
            f"it must be at least {row_bytes.max()}"
        )
    step = bucket_bytes // np.maximum(row_bytes, 1)
    pieces = -(-boxes["rows"] // step)
    if (pieces == 1).all():
        return boxes
    box = np.repeat(np.arange(len(pieces)), pieces)
    start = (np.arange(len(box)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * step[box]
    cut = {name: column[box] for name, column in boxes.items()}
    cut["rows"] = np.minimum(step[box], cut["rows"] - start)
    for name in ("row", "source_row", "target_row"):
        cut[name] = cut[name] + start
    return cut


def _for_all(
    boxes: dict[str, Ints], of_part: Ints, rule: Rule, tensors: TensorTable, sources: Sources, target: EngineTarget
) -> dict[str, Ints]:
    """The boxes of one tensor for all of its kind, in every layer and of every expert."""
    per_tensor = len(boxes["slot"])
    tensor = np.repeat(of_part, per_tensor)
    columns = {name: np.tile(column, len(of_part)) for name, column in boxes.items()}
    slot, member = columns.pop("slot"), columns.pop("member")
    layer, expert = tensors.layer[tensor], tensors.expert[tensor]
    if rule.packing.tp_axis is None:
        # held by all slots: a rank is served by those that have the rest of what it holds, by each of them in turn
        of_expert = rule.is_expert
        slots, ranks = (sources.layout.etp, target.expert_tp) if of_expert else (sources.layout.tp, target.ranks)
        slot = (member * slots + tensor % slots) // (1 if target.takes_whole(rule) else ranks)
    if rule.stage == "layer":
        stage = sources.stage_of_layer[layer]
    else:
        stage = np.full_like(tensor, 0 if rule.stage == "first" else sources.layout.pp - 1)
    return columns | {
        "tensor": tensor,
        "source": sources.number(rule, stage, expert, slot),
        "engine_rank": target.first_ranks(rule, expert, sources.num_experts) + member,
    }
