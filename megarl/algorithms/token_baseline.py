"""A baseline for every token, from the gradients that responses have gathered by then
(docs/methods.md#advantage-optimal_token_baseline)."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOutputs, discounted_sum, estimator, token_rewards
from megarl.algorithms.group_statistics import response_statistics, rows_of_groups


@estimator("optimal_token_baseline")
def optimal_token_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """G_t − b_t with b_t = ΣG_t·W_t / ΣW_t over the responses of the group that have a t-th sampled token (arXiv 2602.07078).

    G_t is the reward-to-go. W_t = Σ_{j≤t} (1 − 2π_j + Σ_v π_j(v)²) over sampled tokens j: the squared norm of each token's
    gradient in its logits, gathered up to t. Exactly 0 where all responses that have a t-th token have one G_t.

    Raises:
        ValueError: `old_log_probs` or `collision` is missing.
    """
    if inputs.old_log_probs is None or inputs.collision is None:
        raise ValueError("optimal_token_baseline needs old_log_probs and collision, but one of them is missing")
    dropped = response_statistics(inputs).alone
    advantages = torch.zeros(inputs.mask.shape, dtype=inputs.scores.dtype)
    for rows in rows_of_groups(inputs, ~dropped):
        mask = inputs.mask[rows]
        rewards = token_rewards(inputs.scores[rows].double(), inputs.token_penalty[rows], mask)
        numbers = mask.sum(1)
        has = torch.arange(int(numbers.max())) < numbers[:, None]  # the t-th sampled token of each, whatever lies between
        to_go, energy = (torch.zeros(has.shape, dtype=torch.float64) for _ in range(2))
        to_go[has] = discounted_sum(rewards, mask, 1.0)[mask]
        energy[has] = 1 - 2 * inputs.old_log_probs[rows][mask].double().exp() + inputs.collision[rows][mask]
        weights = energy.clamp_(min=0).cumsum(1) * has
        mean = (to_go * has).sum(0) / has.sum(0)
        distance = torch.where(has, to_go - mean, 0)  # weighing distances from the mean keeps large rewards exact
        total = weights.sum(0)
        shift = torch.where(total > 0, (weights * distance).sum(0) / total, 0)
        lowest, highest = torch.where(has, to_go, torch.inf).amin(0), torch.where(has, to_go, -torch.inf).amax(0)
        tied = lowest == highest
        part = torch.zeros(mask.shape, dtype=torch.float64)
        part[mask] = torch.where(tied, 0, distance - shift)[has]
        advantages[rows] = part.to(advantages.dtype)
    return AdvantageOutputs(advantages=advantages, dropped=dropped)
