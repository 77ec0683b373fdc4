"""Tokens of an optimizer step that a loss treats apart: by their covariance, or by their entropy.

Formulas and sources: docs/methods.md#covariance-of-a-token and docs/methods.md#loss-on-the-top-share-of-entropies.

A choice is made over all sampled tokens of the step and before its first backward pass, so that it is the same for every
micro-batch size and layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.algorithms.catalogue import COVARIANCE_BOUNDS

PER_NAT = 10_000
"""Largest values are told apart to 1/`PER_NAT`: the same token after the same prompt, in several responses, has the same value
but for rounding, which is another in another layout."""


def covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(logp − mean logp)·(A − mean A) at every token in `mask`, with means over all of them (arXiv 2505.22617).

    Args:
        log_probs: float `[B, T]`, before the update.
        advantages: float `[B, T]`.
        mask: bool `[B, T]`, N sampled tokens of the optimizer step.

    Returns:
        float64 `[N]`, in the order of `tensor[mask]`; its mean is the covariance of the two.
    """
    of_log_probs = log_probs[mask].double()
    of_log_probs -= of_log_probs.mean()
    of_advantages = advantages[mask].double()
    of_advantages -= of_advantages.mean()
    return of_log_probs.mul_(of_advantages)


def tokens_within_covariances(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    seeds: Sequence[int],
    *,
    share: float = 2e-4,
    low: float = COVARIANCE_BOUNDS[0],
    high: float = COVARIANCE_BOUNDS[1],
) -> Tensor:
    """A random pick of tokens whose `covariance` lies between `low` and `high` (Clip-Cov, arXiv 2505.22617).

    `share` of all sampled tokens, rounded down and at least 1, or as many as lie between the bounds. Every token in `mask`
    draws a number, and those with the smallest are picked: a covariance that rounds to the other side of a bound moves one
    pick, not all.

    Args:
        log_probs, advantages, mask: as `covariance` takes them.
        seeds: of every response's draw, B numbers below 2³²; so a token's number does not depend on the order of responses.
        share: above 0 and at most 1.
        low: lower bound, which a covariance must exceed.
        high: upper bound, which it must stay below.

    Returns:
        bool `[B, T]`.
    """
    covariances = covariance(log_probs, advantages, mask)
    eligible = (covariances > low) & (covariances < high)
    count = min(_count(share, len(covariances)), int(eligible.sum()))
    return _at(_drawn(seeds, mask).masked_fill_(~eligible, 2.0).topk(count, largest=False).indices, mask)


def tokens_of_largest_covariance(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, seeds: Sequence[int], *, share: float = 2e-4
) -> Tensor:
    """The tokens of the largest `covariance`: `share` of all, rounded down and at least 1 (KL-Cov, arXiv 2505.22617).

    Of those that are equal to 1/`PER_NAT` the first in the batch.

    Args:
        log_probs, advantages, mask: as `covariance` takes them.
        seeds: not used; every choice is given them.
        share: above 0 and at most 1.

    Returns:
        bool `[B, T]`.
    """
    covariances = covariance(log_probs, advantages, mask)
    if not len(covariances):
        return mask
    count, rounded = _count(share, len(covariances)), covariances.mul_(PER_NAT).round_()
    threshold = _largest(rounded, count)
    above = rounded > threshold
    level = (rounded == threshold).nonzero().squeeze(1)[: count - int(above.sum())]
    return _at(torch.cat([above.nonzero().squeeze(1), level]), mask)


CHOICES: dict[str, Callable[..., Tensor]] = {
    "clip_cov": tokens_within_covariances,
    "kl_cov": tokens_of_largest_covariance,
}
"""By policy loss, how its `chosen` tokens are picked: (log_probs, advantages, mask, seeds, numbers by name) → bool."""


def top_entropies(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """The tokens in `mask` of the largest entropy: `share` of all, rounded down and at least 1, and those that equal the last
    to 1/`PER_NAT` nats.

    Args:
        entropy: float `[B, T]`, in nats, before the update.
        mask: bool `[B, T]`, the sampled tokens of the optimizer step.
        share: ρ, above 0 and at most 1.

    Returns:
        bool `[B, T]` (arXiv 2506.01939).
    """
    rounded = entropy[mask].mul_(PER_NAT).round_()
    if not len(rounded):
        return mask
    threshold = _largest(rounded, _count(share, len(rounded)))
    return mask & (entropy.mul(PER_NAT).round_() >= threshold)


def _drawn(seeds: Sequence[int], mask: Tensor) -> Tensor:
    """A number in [0, 1) for every token in `mask`, float64 `[N]`: the n-th of a response is the n-th of its seed."""
    numbers = zip(seeds, mask.sum(1).tolist(), strict=True)
    rows = [torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed, n in numbers if n]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)


def _count(share: float, tokens: int) -> int:
    """`share` of `tokens`, rounded down and at least 1; 0 of none. What is a whole number but for rounding is that number."""
    return min(max(math.floor(share * tokens + 1e-9), 1), tokens)


def _largest(values: Tensor, count: int) -> Tensor:
    """The `count`-th largest of `values` `[N]`."""
    return values.kthvalue(len(values) - count + 1).values


def _at(places: Tensor, mask: Tensor) -> Tensor:
    """bool `[B, T]`, true at the tokens in `mask` with these numbers, int64 `[k]`."""
    picked = torch.zeros(int(mask.sum()), dtype=torch.bool)
    picked[places] = True
    chosen = torch.zeros_like(mask)
    chosen[mask] = picked
    return chosen
