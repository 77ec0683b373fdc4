"""Tokens that top-p, top-k and min-p leave to be sampled, over a vocabulary that is split across a group."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.megatron.options import SamplingLimits
from megarl.megatron.row_gradients import RowGradients
from megarl.megatron.running_sums import running_sum


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
    reached = running_sum((ordered - peak).exp_())
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


def sums_of_kept(logits: Tensor, absent: Tensor, real: int, *, squares: bool) -> list[Tensor]:
    """`logit_passes.row_sums` from the second on of the tokens that are not `absent`, with the sum over all as the third.

    `logits` are relative to the peak, and are overwritten.
    """
    exponentials = logits.exp()
    logits[:, real:] = 0.0
    of_all = exponentials.sum(1)
    logits.masked_fill_(absent, 0.0)
    exponentials.masked_fill_(absent, 0.0)
    further = [torch.linalg.vector_norm(exponentials, dim=1).square()] if squares else []
    total = exponentials.sum(1)
    return [total, exponentials.mul_(logits).sum(1), of_all, *further]


def gradient_of_kept(log_p: Tensor, real: int, given: RowGradients, least: Tensor) -> Tensor:
    """Gradient of n rows' logits over the temperature, `log_p` float32 `[n, V/tp]`, which are overwritten; `least` `[n, 1]` is
    `least_kept`'s."""
    absent = left_out(log_p, least, (given.target[:, 0], given.here[:, 0]))
    p = log_p.sub_(given.log_z[:, None]).exp()
    log_p[:, real:] = 0.0
    p.masked_fill_(absent, 0.0)
    log_p.masked_fill_(absent, 0.0)
    factor = log_p.add_(given.entropy[:, None]).mul_(given.of_entropy[:, None])
    p.mul_(factor.add_(given.of_log_probs.sum(1, keepdim=True))).neg_()
    del log_p, factor
    p.scatter_add_(1, given.target, given.of_log_probs * given.here)
    return p
