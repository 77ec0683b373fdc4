"""Cross-entropy of a layer for multi-token prediction, over a vocabulary split across a group, without a full logit matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.megatron.heads import VocabularySlice, row_chunks
from megarl.megatron.slice_sums import largest_of_all


class PredictionLoss(torch.autograd.Function):
    """Cross-entropy of predicted rows, against the policy's own distribution of the same tokens or against the tokens."""

    @staticmethod
    def forward(
        ctx: Any, drafted: Tensor, policy: Tensor | None, targets: Tensor, vocabulary: VocabularySlice, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """`drafted` `[N, H]`, `policy` `[N, H]` (soft targets; None: hard ones), `targets` int64 `[N]` → float32 `[N]` in nats,
        and bool `[N]`: whether the likeliest token is the target.

        Only `drafted` gets a gradient: this rank's part, which the caller sums over the group.
        """
        losses = torch.empty(len(drafted), dtype=torch.float32, device=drafted.device)
        hits = torch.empty(len(drafted), dtype=torch.bool, device=drafted.device)
        log_z = torch.empty_like(losses)
        log_z_policy = torch.empty_like(losses)
        for rows in row_chunks(len(drafted), chunk_tokens):
            logits = vocabulary.logits(drafted[rows])
            log_z[rows], peak = _log_sum(logits, vocabulary)
            hits[rows] = _likeliest(logits, peak, vocabulary) == targets[rows]
            logits[:, vocabulary.real :] = 0.0
            logits -= peak[:, None]  # everything relative to it: subtracting two large numbers last would cost digits
            if policy is None:
                local_ids, here = vocabulary.local(targets[rows])
                expected = torch.where(here, logits.gather(1, local_ids[:, None])[:, 0], 0.0)
            else:
                of_policy = vocabulary.logits(policy[rows])
                log_z_policy[rows], _ = _log_sum(of_policy, vocabulary)
                expected = of_policy.sub_(log_z_policy[rows, None]).exp_().mul_(logits).sum(1)
            losses[rows] = log_z[rows] - peak - _summed(expected, vocabulary)
        ctx.save_for_backward(drafted, policy, targets, log_z, log_z_policy, vocabulary.weight)
        ctx.settings = (vocabulary, chunk_tokens)
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """This rank's part of the gradient of `drafted`: (q - p) W / temperature, of each row."""
        drafted, policy, targets, log_z, log_z_policy, weight = ctx.saved_tensors
        vocabulary, chunk_tokens = ctx.settings
        gradient = torch.empty_like(drafted)
        for rows in row_chunks(len(drafted), chunk_tokens):
            difference = vocabulary.logits(drafted[rows]).sub_(log_z[rows, None]).exp_()
            if policy is None:
                local_ids, here = vocabulary.local(targets[rows])
                difference.scatter_add_(1, local_ids[:, None], -here.to(difference.dtype)[:, None])
            else:
                difference -= vocabulary.logits(policy[rows]).sub_(log_z_policy[rows, None]).exp_()
            difference.mul_(grads[0][rows, None]).div_(vocabulary.temperature)
            gradient[rows] = difference.to(weight.dtype) @ weight
        return gradient, None, None, None, None


def _log_sum(logits: Tensor, vocabulary: VocabularySlice) -> tuple[Tensor, Tensor]:
    """The log for `logits` `[n, V/tp]` of the sum of exponentials over all slices, `[n]`, and the largest."""
    peak = largest_of_all(logits.amax(dim=1), vocabulary.group)
    return _summed((logits - peak[:, None]).exp_().sum(1), vocabulary).log() + peak, peak


def _likeliest(logits: Tensor, peak: Tensor, vocabulary: VocabularySlice) -> Tensor:
    """int64 `[n]`: a token whose logit is `peak`, the largest over all slices."""
    values, ids = logits.max(dim=1)
    ids = torch.where(values == peak, ids + vocabulary.start, torch.iinfo(torch.int64).max)
    if vocabulary.group.size() > 1:
        torch.distributed.all_reduce(ids, torch.distributed.ReduceOp.MIN, group=vocabulary.group)
    return ids


def _summed(values: Tensor, vocabulary: VocabularySlice) -> Tensor:
    if vocabulary.group.size() > 1:
        torch.distributed.all_reduce(values, group=vocabulary.group)
    return values
