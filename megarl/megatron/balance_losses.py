"""The losses that keep experts in balance, as what multiplies each token's scores: exact sums over the batch in every layout.

megatron-core's own are means within a micro-batch, scaled by its tokens: their weight depends on how a batch is cut. Here the
denominators are those of the whole batch. How often an expert was chosen is a constant of each loss, so a loss is linear in the
scores: every rank adds the part of its own tokens, and gradients are sums over ranks like all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.data.stream_sequences import TokenSequences


class BalanceTerms(NamedTuple):
    """The balance losses of one layer's router on the T tokens of a rank, whose segments are `segment` (int64 `[T]`).

    `of_scores` float32 `[G + 1, E]` and `of_squares` float32 `[G + 1]`: by segment what a token's normalised scores, and its
    squared log-sum-exp, are multiplied by.
    """

    segment: Tensor
    of_scores: Tensor
    of_squares: Tensor

    def loss(self, logits: Tensor, function: str) -> Tensor:
        """This rank's part of the losses, a scalar, for logits `[T, E]` of a router with this score function."""
        of_scores = (self.of_scores[self.segment] * normalised_scores(logits, function)).sum()
        return of_scores + (self.of_squares[self.segment] * squared_log_sum(logits)).sum()


def normalised_scores(logits: Tensor, function: str) -> Tensor:
    """A router's scores of all experts `[T, E]`, float32, that sum to one: its softmax, or its sigmoids, or the roots of its
    softpluses, over their sum."""
    if function == "softmax":
        return logits.float().softmax(-1)
    scores = torch.nn.functional.softplus(logits.float()).sqrt() if function == "sqrtsoftplus" else logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)


def squared_log_sum(logits: Tensor) -> Tensor:
    """The squared log of the sum of exponentials, float32 `[T]`: ST-MoE's z-loss of each token (arXiv 2202.08906, eq. 5)."""
    return logits.float().logsumexp(-1).square()


def batch_terms(loads: Tensor, tokens: Tensor, top_k: int, sequences: TokenSequences) -> Tensor:
    """The balance loss over a whole batch by segment, float32 `[G + 1, E]`: E · Σᵢ fᵢ · Pᵢ (arXiv 2501.11873).

    fᵢ is the share of the batch's choices that fell on expert i (`loads` `[E]` of `top_k * tokens`), Pᵢ its mean score.
    """
    shares = loads * len(loads) / (top_k * tokens)
    return sequences.weights[:, None] * (shares / tokens).float()


def sequence_terms(scores: Tensor, top_k: int, sequences: TokenSequences, number: Tensor, group: Any) -> Tensor:
    """DeepSeek-V3's balance loss of each sequence, mean over the batch's `number` ones, by segment, float32 `[G + 1, E]`.

    In it fᵢ counts the tokens of a sequence for which expert i is among the `top_k` of highest score, whatever biases and
    groups made of that (arXiv 2412.19437, eq. 17 to 20). The ranks of `group` share the sequences' tokens.
    """
    experts = scores.shape[-1]
    picked = torch.zeros_like(scores).scatter_(1, scores.topk(top_k, dim=1).indices, 1.0)
    counts = scores.new_zeros(sequences.members.shape[1] + 1, experts).index_add_(0, sequences.segment, picked)
    if group.size() > 1:
        torch.distributed.all_reduce(counts, group=group)
    lengths = sequences.lengths.clamp_min(1)[:, None]
    shares = (sequences.members @ counts[:-1]) * experts / (top_k * lengths)
    of_segments = sequences.members.T @ (shares / (lengths * number))
    return torch.nn.functional.pad(of_segments, (0, 0, 0, 1))


class WithLoss(torch.autograd.Function):
    """A tensor as it is, behind which a scalar loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)
