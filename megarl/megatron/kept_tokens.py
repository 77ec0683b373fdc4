"""Tokens that top-p, top-k and min-p leave to be sampled, over a vocabulary that is split across a group."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.megatron.options import SamplingLimits


def least_kept(logits: Tensor, peak: Tensor, limits: SamplingLimits, group: torch.distributed.ProcessGroup) -> Tensor:
    """The logit from which on a token is kept, float32 `[n, 1]`, the same on every rank of `group`.

    `logits` float32 `[n, V/tp]` are those under the sampling temperature, `peak` `[n, 1]` those of the likeliest tokens. A
    token is kept if it is among the `top_k` likeliest, if those likelier than it have less than `top_p` of the probability, and
    if it has at least `min_p` of the likeliest one's: each judged by the whole distribution. Equal logits are kept or left
    out together.
    """
    least = peak + math.log(limits.min_p) if limits.min_p else torch.full_like(peak, -torch.inf)
    if limits.top_p >= 1 and not limits.top_k:
        return least
    size, rank = group.size(), group.rank()
    if size == 1:
        return least.maximum(_least_of_rows(logits, peak, limits))
    # Each rank has the whole vocabulary of its part of the rows for a moment: as many numbers as its part of all rows'.
    rows = [len(logits) // size + (number < len(logits) % size) for number in range(size)]
    whole = logits.new_empty(rows[rank] * size, logits.shape[1])
    torch.distributed.all_to_all_single(whole, logits.contiguous(), [rows[rank]] * size, rows, group=group)
    whole = whole.view(size, rows[rank], logits.shape[1]).transpose(0, 1).reshape(rows[rank], size * logits.shape[1])
    rank_rows = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    thresholds = torch.zeros_like(peak)
    thresholds[rank_rows] = _least_of_rows(whole, peak[rank_rows], limits)
    torch.distributed.all_reduce(thresholds, group=group)
    return least.maximum(thresholds)


def _least_of_rows(logits: Tensor, peak: Tensor, limits: SamplingLimits) -> Tensor:
    """The threshold of top-k and top-p for rows that are whole."""
    count = min(limits.top_k or logits.shape[1], logits.shape[1])
    if limits.top_p >= 1:
        return logits.topk(count, dim=1).values[:, -1:]
    ordered = logits.sort(dim=1, descending=True).values
    reached = (ordered - peak).exp_().cumsum(1)
    mass = limits.top_p * reached[:, -1:]
    kept_count = 1 + (reached[:, :-1] < mass).sum(1, keepdim=True)
    return ordered.gather(1, kept_count.clamp(max=count) - 1)


def left_out(logits: Tensor, least: Tensor, local: tuple[Tensor, Tensor]) -> Tensor:
    """bool `[n, V/tp]`: the tokens below `least`, but for the one that was sampled, wherever it is.

    `local`: this rank's number of each row's sampled token, and whether it is in this rank's part of the vocabulary.
    """
    target, here = local
    below = logits < least
    return below.scatter_(1, target[:, None], below.gather(1, target[:, None]) & ~here[:, None])
