"""The likeliest tokens of each row, over a vocabulary that is split across a group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.data.stream import TopK


def likeliest(
    logits: Tensor, top_k: TopK, temperature: float, start: int, real: int, group: torch.distributed.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Ids and float32 logits, `[n, k]` each, of the largest of `logits` `[n, V/tp]` over all slices, of which each sends k.

    `start` is the first id of the slice, and `real` how many of its ids are no padding. Logits are divided by `temperature`.
    """
    known = logits[:, : max(0, min(top_k.vocabulary - start, real))]
    values, ids = known.topk(min(top_k.k, known.shape[1]), dim=1)
    values = values.float().div_(temperature)
    missing = (0, top_k.k - values.shape[1])
    values, ids = pad(values, missing, value=-torch.inf), pad(ids + start, missing)
    if group.size() > 1:
        of_ranks = [[torch.empty_like(part) for _ in range(group.size())] for part in (values, ids)]
        for gathered, part in zip(of_ranks, (values, ids), strict=True):
            torch.distributed.all_gather(gathered, part, group=group)
        values, ids = (torch.cat(parts, dim=1) for parts in of_ranks)
        values, order = values.topk(top_k.k, dim=1)
        ids = ids.gather(1, order)
    return ids, values
