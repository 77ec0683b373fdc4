"""Work on a batch's rows, done by the ranks that report for the policy's replicas, each on whole groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapreplace
from typing import Any

import torch

from megarl.data.stored_batch import StoredBatch
from megarl.data.stored_shares import Computed, RowTask
from megarl.workers.group import StoringGroup
from megarl.workers.rank_calls import RankCalls


def compute_on_ranks(group: StoringGroup, batch: StoredBatch, task: RowTask, deadline_s: float) -> list[Any]:
    """Have a task done as `TrainingSide.compute` says, on the reporting ranks of `group`."""
    parts = row_parts(batch.groups.tolist(), batch.lengths.tolist(), group.layout.dp if task.apart else 1)
    read = [name for name in batch.columns if task.columns is None or name in task.columns]
    calls: dict[int, Any] = {}
    shared = group.shared((task.work, *task.common))
    for replica, rows in enumerate(parts):
        light = [batch.samples[row].for_work() for row in rows]
        whole = group.whole(replica, [batch.lone_rows(rows, read)])
        calls[group.reporting[replica]] = (shared, whole, light, task.arguments(rows), len(parts) == 1)
    submitted = group.submit_stored(RankCalls.compute, calls)
    phase = f"{getattr(task.work, '__name__', 'work').replace('_', ' ')} on rows"
    of_ranks = group.wait_stored(submitted, phase=phase, deadline_s=deadline_s)
    told: list[Computed] = [of_ranks[rank][0] for rank in calls]
    answers = [(of_ranks[rank][1], rows) for rank, rows in zip(calls, parts, strict=True)]
    batch.take(told[0].names, answers)
    if told[0].counts is not None:
        counts = batch.counts.clone()
        for part, rows in zip(told, parts, strict=True):
            assert part.counts is not None, "a mask that one part changed is told by all"
            counts[rows] = torch.tensor(part.counts)
        batch.take_mask(answers, len(told[0].names), counts)
    return [part.answer for part in told]


def row_parts(groups: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """The rows of each of `parts` parts, in order: whole groups, about as many tokens each.

    One part has all rows where there are fewer groups than parts.
    """
    tokens, rows = Counter[int](), dict[int, list[int]]()
    for row, (group, length) in enumerate(zip(groups, lengths, strict=True)):
        tokens[group] += length
        rows.setdefault(group, []).append(row)
    if len(rows) < parts:
        return [[*range(len(groups))]]
    heap = [(0, 0, part) for part in range(parts)]
    of_parts: list[list[int]] = [[] for _ in heap]
    for group, count in tokens.most_common():
        load, groups_there, part = heap[0]
        of_parts[part] += rows[group]
        heapreplace(heap, (load + count, groups_there + 1, part))
    return [sorted(part) for part in of_parts]
