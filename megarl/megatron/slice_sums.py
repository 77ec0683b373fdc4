"""Largest logits and sums of rows over a vocabulary that is split across a group."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_to_all(sums: Tensor, group: torch.distributed.ProcessGroup) -> list[Tensor]:
    """The largest logit of each row over all slices, and the further `row_sums` of this rank's slice relative to it."""
    if group.size() == 1:
        return [*sums]
    peak = largest_of_all(sums[0].clone(), group)
    lower = torch.where(sums[0] == -torch.inf, 0.0, sums[0] - peak)  # a slice of padding alone has sums of 0
    factor = lower.exp()
    return [peak, factor * sums[1], factor * (sums[2] + lower * sums[1]), *(factor.square() * more for more in sums[3:])]


def largest_of_all(peak: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """`peak` of all ranks, in its place."""
    if group.size() > 1:
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX, group=group)
    return peak
