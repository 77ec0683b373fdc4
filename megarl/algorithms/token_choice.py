"""Tokens of an optimizer step that a loss treats apart: by their covariance, or by their entropy.

Formulas and sources: docs/methods.md#covariance-of-a-token and docs/methods.md#loss-on-the-top-share-of-entropies.

A choice is made over all sampled tokens of the step and before its first backward pass, so that it is the same for every
micro-batch size and layout. Where the rows of the step are in several shards, these count their tokens by value, a few bits
of it at a time, until the last value that is picked is known: exactly the picks of one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.algorithms.catalogue import COVARIANCE_BOUNDS
from megarl.algorithms.shard import WHOLE, Shard, batch_total, before_each_row, row_sums

PER_NAT = 10_000
"""Largest values are told apart to 1/`PER_NAT`: the same token after the same prompt, in several responses, has the same value
but for rounding, which is another in another layout."""


DIGIT_BITS = 12
"""Bits of a value by which tokens are counted at a time."""


def covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor, shard: Shard = WHOLE) -> Tensor:
    """(logp − mean logp)·(A − mean A) at every token in `mask`, with means over all of them (arXiv 2505.22617).

    Args:
        log_probs: float `[B, T]`, before the update.
        advantages: float `[B, T]`.
        mask: bool `[B, T]`, N sampled tokens of the optimizer step.
        shard: the way to the other rows of the step, whose tokens count in the means.

    Returns:
        float64 `[N]`, in the order of `tensor[mask]`; its mean is the covariance of the two.
    """
    tokens = int(shard.total(mask.sum()[None]))
    totals = batch_total(torch.stack([row_sums(log_probs, mask), row_sums(advantages, mask)], 1), shard)
    of_log_probs, of_advantages = totals / max(tokens, 1)
    return (log_probs[mask].double() - of_log_probs).mul_(advantages[mask].double().sub_(of_advantages))


def tokens_within_covariances(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    seeds: Sequence[int],
    shard: Shard = WHOLE,
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
        log_probs, advantages, mask, shard: as `covariance` takes them.
        seeds: of every response's draw, B numbers below 2³²; so a token's number does not depend on the order of responses.
        share: above 0 and at most 1.
        low: lower bound, which a covariance must exceed.
        high: upper bound, which it must stay below.

    Returns:
        bool `[B, T]`.
    """
    covariances = covariance(log_probs, advantages, mask, shard)
    eligible = (covariances > low) & (covariances < high)
    tokens, number = shard.total(torch.stack([mask.sum(), eligible.sum()])).tolist()
    among = torch.zeros_like(mask)
    among[mask] = eligible
    return _of_largest(_drawn(seeds, mask).neg_()[eligible], min(_count(share, tokens), number), among, shard)


def tokens_of_largest_covariance(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, seeds: Sequence[int], shard: Shard = WHOLE, *, share: float = 2e-4
) -> Tensor:
    """The tokens of the largest `covariance`: `share` of all, rounded down and at least 1 (KL-Cov, arXiv 2505.22617).

    Of those that are equal to 1/`PER_NAT` the first in the batch.

    Args:
        log_probs, advantages, mask, shard: as `covariance` takes them.
        seeds: not used; every choice is given them.
        share: above 0 and at most 1.

    Returns:
        bool `[B, T]`.
    """
    rounded = covariance(log_probs, advantages, mask, shard).mul_(PER_NAT).round_()
    return _of_largest(rounded, _count(share, int(shard.total(mask.sum()[None]))), mask, shard)


CHOICES: dict[str, Callable[..., Tensor]] = {
    "clip_cov": tokens_within_covariances,
    "kl_cov": tokens_of_largest_covariance,
}
"""By policy loss, how its `chosen` tokens are picked: (log_probs, advantages, mask, seeds, shard, numbers by name) →
bool `[B, T]`."""


def top_entropies(entropy: Tensor, mask: Tensor, share: float, shard: Shard = WHOLE) -> Tensor:
    """The tokens in `mask` of the largest entropy: `share` of all, rounded down and at least 1, and those that equal the last
    to 1/`PER_NAT` nats.

    Args:
        entropy: float `[B, T]`, in nats, before the update.
        mask: bool `[B, T]`, the sampled tokens of the optimizer step.
        share: ρ, above 0 and at most 1.
        shard: the way to the other rows of the step.

    Returns:
        bool `[B, T]` (arXiv 2506.01939).
    """
    count = _count(share, int(shard.total(mask.sum()[None])))
    threshold = _largest(entropy[mask].mul_(PER_NAT).round_(), count, shard)
    return mask & (entropy.mul(PER_NAT).round_() >= threshold)


def _drawn(seeds: Sequence[int], mask: Tensor) -> Tensor:
    """A number in [0, 1) for every token in `mask`, float64 `[N]`: the n-th of a response is the n-th of its seed."""
    numbers = zip(seeds, mask.sum(1).tolist(), strict=True)
    rows = [torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed, n in numbers if n]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)


def _count(share: float, tokens: int) -> int:
    """`share` of `tokens`, rounded down and at least 1; 0 of none. What is a whole number but for rounding is that number."""
    return min(max(math.floor(share * tokens + 1e-9), 1), tokens)


def _of_largest(values: Tensor, count: int, among: Tensor, shard: Shard) -> Tensor:
    """The tokens of the `count` largest `values` `[n]` of all shards, which are those of the n tokens in `among` bool `[B, T]`,
    as bool `[B, T]`; of equal ones the first in the batch."""
    threshold = _largest(values, count, shard)
    above, level = torch.zeros_like(among), torch.zeros_like(among)
    above[among], level[among] = values > threshold, values == threshold
    left = count - int(shard.total(above.sum()[None]))
    before = before_each_row(level.sum(1), shard)[:, None] + level.cumsum(1)  # counts this token
    return above | (level & (before <= left))


def _largest(values: Tensor, count: int, shard: Shard) -> Tensor:
    """The `count`-th largest of the `values` `[n]` of all shards, by its bits from the first on; infinity if `count` is 0."""
    bits = 8 * values.element_size()
    keys = values.view(torch.int32 if bits == 32 else torch.int64)
    keys = keys ^ ((keys >> (bits - 1)) & torch.iinfo(keys.dtype).max)  # in the order of the values
    found, below = 0, bits
    while count and below:
        width = min(DIGIT_BITS, below)
        below -= width
        lowest = -(1 << (width - 1)) if below + width == bits else 0  # the first digit has the sign
        digits = (keys >> below) - (found << width)
        of_digits = shard.total(torch.bincount(digits - lowest, minlength=1 << width))
        at_least = of_digits.flip(0).cumsum(0).flip(0)
        place = int((at_least >= count).sum()) - 1
        count -= int(at_least[place] - of_digits[place])
        found = (found << width) + place + lowest
        keys = keys[digits == place + lowest]
    if not count:
        return values.new_tensor(torch.inf)
    key = torch.tensor([found], dtype=keys.dtype)
    return (key ^ ((key >> (bits - 1)) & torch.iinfo(keys.dtype).max)).view(values.dtype)[0]
