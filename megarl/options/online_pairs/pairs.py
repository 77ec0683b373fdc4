"""The pairs of a step that a pair loss learns from: of every group the best response and the worst."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megarl.data.batch import Batch


@dataclass(frozen=True)
class OnlinePairs:
    """Rows of a batch: two of every group that has two, and of these the ones whose rewards differ."""

    rows: tuple[int, ...]
    untied: frozenset[int]

    def figures(self) -> dict[str, float]:
        """How many pairs teach something, and how many groups' best and worst are tied."""
        return {"pairs/used": len(self.untied) / 2, "pairs/tied": (len(self.rows) - len(self.untied)) / 2}


def choose_pairs(batch: Batch) -> OnlinePairs:
    """The first response of the highest advantage in each group against the first of the lowest; adds `pair` and `is_chosen`.

    The columns are float `[B, T]`, the same at every token of a response: the number of its group, and 1 or 0. A response
    without sampled tokens is in no pair, nor is one to another prompt than its group's first. Of a tied group two are kept, so
    that every step has the same size; they teach nothing.
    """
    values = batch.columns["advantages"].masked_fill(~batch.mask, -torch.inf).amax(1).tolist()
    usable = batch.mask.any(1).tolist()
    of_group: dict[int, list[int]] = {}
    for row, group in enumerate(batch.groups.tolist()):
        first = of_group.get(group, [row])[0]
        if usable[row] and _prompt(batch, row) == _prompt(batch, first):
            of_group.setdefault(group, []).append(row)
    rows, untied, chosen = list[int](), set[int](), torch.zeros(len(batch))
    for members in (members for members in of_group.values() if len(members) > 1):
        best, worst = max(members, key=values.__getitem__), min(members, key=values.__getitem__)
        if values[best] == values[worst]:
            best, worst = members[:2]
        else:
            untied |= {best, worst}
        chosen[best] = 1
        rows += [best, worst]
    batch.columns["pair"] = batch.groups[:, None].float().expand(batch.mask.shape)
    batch.columns["is_chosen"] = chosen[:, None].expand(batch.mask.shape)
    return OnlinePairs(tuple(rows), frozenset(untied))


def _prompt(batch: Batch, row: int) -> tuple[Any, ...]:
    sample = batch.samples[row]
    return (sample.prompt_media, *sample.prompt_ids)
