"""Drawing of tokens from logits: temperature, top-k, top-p and min-p, and the acceptance rule of speculative decoding.

Pure functions of tensors. A row's random numbers come from a generator of its own, so a draw does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.rollout.engines.protocol import SamplingParams


def weights_and_log_probs(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """From float32 `logits` [N, V] the weights by which tokens are drawn, float64 [N, V], and log-probs, float32 [N, V].

    Log-probs are those of the full distribution under the temperature (greedy: 1); top-k, top-p and min-p only take weights
    away, so that a row's weights may add up to less than 1.
    """
    full = (logits if params.greedy else logits / params.temperature).log_softmax(-1)
    if params.greedy:
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(1, logits.argmax(-1, keepdim=True), 1.0), full
    probs = full.double().exp()
    if params.top_k > 0 or params.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        if params.top_k > 0:
            ordered[:, params.top_k :] = 0
        # a token stays if those likelier than it do not reach top_p yet; so the likeliest always stays
        ordered[ordered.cumsum(-1) - ordered >= params.top_p] = 0
        probs = torch.zeros_like(probs).scatter_(1, order, ordered)
    probs[probs < params.min_p * probs.amax(-1, keepdim=True)] = 0
    return probs, full


def random_numbers(generators: Sequence[torch.Generator], count: int) -> Tensor:
    """float64 `[B, count]` from 0 up to 1, each row's from its own generator."""
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=generator) for generator in generators])


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """One token for each row of `weights` [N, V] by the inverse of the cumulative distribution, which is computed in float64;
    `numbers` float64 [N], from 0 up to 1. Returns [N]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    drawn = numbers[:, None].to(weights.device) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, drawn, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def sample(logits: Tensor, params: SamplingParams, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Sample from float32 `logits` [B, V] with one generator per row; returns tokens [B] and their log-probs [B]."""
    weights, log_probs = weights_and_log_probs(logits, params)
    tokens = weights.argmax(-1) if params.greedy else draw(weights, random_numbers(generators, 1)[:, 0])
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


class Proposals(NamedTuple):
    """Tokens that a draft proposes to follow each row.

    `tokens` int64 [B, K], of which the first `counts` int64 [B] of each row count; `probs` float64 [B, K, V] are the
    distributions that they were drawn from; None: they were not drawn, but follow from the tokens before them.
    """

    tokens: Tensor
    counts: Tensor
    probs: Tensor | None


def verify(weights: Tensor, proposals: Proposals, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the proposals that stay, and the token behind them, so that all are distributed as if drawn from `weights`
    one by one.

    A proposal x stays with probability min(1, p(x) / q(x)), p and q being the distributions of the policy and of the draft;
    behind the first that does not, a token is drawn from max(0, p - q), normalised; behind all of them, from p (Leviathan et
    al. 2023, Chen et al. 2023).

    Args:
        weights: float64 [B, K + 1, V], those of the tokens behind none, one, … K of the proposals.
        proposals: of K tokens.
        numbers: float64 [B, N] from 0 up to 1, N above K; the last column draws the token behind, so that what a row draws does
            not depend on how much was proposed to others.

    Returns:
        How many proposals of each row stay, int64 [B], and the tokens behind them, int64 [B].
    """
    steps = proposals.tokens.shape[1]
    target = weights / weights.sum(-1, keepdim=True)
    drafted = proposals.probs
    if drafted is None:
        drafted = torch.zeros_like(target[:, :steps]).scatter_(2, proposals.tokens[:, :, None], 1.0)
    p, q = (side[:, :steps].gather(2, proposals.tokens[:, :, None])[:, :, 0] for side in (target, drafted))
    proposed = torch.arange(steps, device=target.device) < proposals.counts[:, None]
    numbers = numbers.to(target.device)
    accepted = ((numbers[:, :steps] * q < p) & proposed).long().cumprod(1).sum(1)
    rows = torch.arange(len(target), device=target.device)
    behind = target[rows, accepted]
    was_refused = accepted < proposals.counts
    if steps:
        refused = (behind - drafted[rows, accepted.clamp(max=steps - 1)]).clamp(min=0)
        behind = torch.where(was_refused[:, None], refused, behind)
    return accepted, draw(behind, numbers[:, -1])
