"""The advantage of responses that are judged k at a time: training for pass@k (docs/methods.md#advantage-pass_at_k)."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOutputs, estimator, per_token
from megarl.algorithms.group_statistics import response_statistics, rows_of_groups


@estimator("pass_at_k")
def pass_at_k(inputs: AdvantageInputs, k: int) -> AdvantageOutputs:
    """(mean reward of the k-subsets that hold the response − R̄)/(σ + eps), at every token (arXiv 2508.10751 §2.4).

    The reward of a subset is its largest R, so that of 0/1 rewards it is pass@k. R̄ and σ are mean and standard deviation over
    all k-subsets of the group, in closed form. Exactly 0 where all subsets have one reward. σ is the population's, whatever
    `unbiased` says. Responses of a group of k or fewer are dropped: all their subsets are one.

    Raises:
        ValueError: `k` is below 1.
    """
    if k < 1:
        raise ValueError(f"pass_at_k needs k of at least 1, but it is {k}")
    group, advantages = response_statistics(inputs), torch.zeros(len(inputs.scores), dtype=torch.float64)
    dropped = inputs.mask.any(1) & (group.size <= k)
    for rows in rows_of_groups(inputs, ~dropped):
        value, order = group.centred[rows].sort()  # less the mean: exact far from 0
        if value[k - 1] == value[-1]:  # the smallest and the greatest reward of a subset
            continue
        others, below = len(rows) - 1, torch.arange(len(rows))
        # C(below, k − 1) of the C(others, k − 1) subsets that hold this response have it as their largest, and
        # C(below − 1, k − 2) of those that hold one below it.
        as_largest = _share(below, others, k - 1)
        over_another = (k - 1) / others * _share(below - 1, others - 1, k - 2) * value
        among_all = k / len(rows) * as_largest
        mean = (among_all * value).sum()
        deviation = (among_all * (value - mean).square()).sum().sqrt() + inputs.eps
        above = over_another.flip(0).cumsum(0).flip(0) - over_another
        advantages[rows[order]] = (as_largest * value + above - mean) / deviation
    return AdvantageOutputs(advantages=per_token(inputs, advantages), dropped=dropped)


def _share(chosen: Tensor, size: int, k: int) -> Tensor:
    """C(chosen, k) / C(size, k) of int64 `chosen` `[N]`, float64 `[N]`, as a product of k factors; 0 for k below 0."""
    if k < 0:
        return torch.zeros(len(chosen), dtype=torch.float64)
    step = torch.arange(k)
    return ((chosen[:, None] - step).clamp(min=0) / (size - step).double()).prod(1)
