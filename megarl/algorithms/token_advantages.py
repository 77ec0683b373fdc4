"""Advantages that compare no responses of one prompt with each other: GAE, REINFORCE and its baselines, ReMax.

Formulas and sources: docs/methods.md#advantages. Where a docstring says that advantages are whitened, that is the estimator's
normalisation if `inputs.normalisation` is None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import (
    AdvantageInputs,
    AdvantageOutputs,
    BackwardColumns,
    accumulate,
    discounted_sum,
    estimator,
    per_token,
    token_rewards,
)
from megarl.algorithms.shard import row_sums


def _rewards(inputs: AdvantageInputs) -> Tensor:
    return token_rewards(inputs.scores, inputs.token_penalty, inputs.mask)


def _reward_to_go(inputs: AdvantageInputs) -> Tensor:
    return discounted_sum(_rewards(inputs), inputs.mask, inputs.gamma).to(inputs.scores.dtype)


def _lambda_of_policy(inputs: AdvantageInputs, length_alpha: float | None) -> float | Tensor:
    """λ, or with `length_alpha` each response's own 1 − 1/(α·l), at least 0, float64 `[B]`; l counts sampled tokens."""
    if length_alpha is None:
        return inputs.lam
    lengths = inputs.mask.sum(1).clamp(min=1).double()
    return (1 - 1 / (length_alpha * lengths)).clamp(min=0)


@estimator("gae")
def gae(inputs: AdvantageInputs, critic_lambda: float | None = None, length_alpha: float | None = None) -> AdvantageOutputs:
    """A_t = Σ_b (γλ)^b δ_{t+b}, whitened over the batch, with δ_t = r_t + γV_next − V_t, returns A + V (arXiv 1506.02438).

    "Next" is the next sampled token. After the last one V is 0, or `bootstrap_values` for truncated responses if
    `bootstrap_truncated`.

    Args:
        inputs: λ is `inputs.lam`.
        critic_lambda: λ of the A in the returns, from 0 to 1; None: the same (decoupled GAE, VC-PPO, arXiv 2503.01491).
        length_alpha: α, above 0: λ of a response's advantages is max(0, 1 − 1/(α·l)), l its number of sampled tokens, in
            place of `inputs.lam` (length-adaptive GAE, VAPO, arXiv 2504.05118). None: `inputs.lam`.

    Raises:
        ValueError: `values` is missing, or `truncated` or `bootstrap_values` where bootstrapping needs them.
    """
    if inputs.values is None:
        raise ValueError("gae needs values, but none were given")
    columns = BackwardColumns(inputs.mask)
    next_value, advantage, target = columns.zeros(), columns.zeros(), columns.zeros()
    if inputs.bootstrap_truncated:
        if inputs.truncated is None or inputs.bootstrap_values is None:
            raise ValueError("bootstrap_truncated needs truncated and bootstrap_values, but one of them is missing")
        next_value = torch.where(inputs.truncated, inputs.bootstrap_values.double(), 0)
    rewards, lam = _rewards(inputs), _lambda_of_policy(inputs, length_alpha)
    advantages = torch.zeros_like(rewards, dtype=inputs.scores.dtype)
    returns = torch.zeros_like(advantages)
    for span in columns.spans:
        inside, values = columns.inside(span), columns.read(inputs.values, span)
        latest = values.clone()  # V of the next sampled token, that of this column included
        following = next_value[None]
        next_value = accumulate(latest, 1 - inside, next_value)
        delta = columns.read(rewards, span).add_(torch.cat([latest[1:], following]).mul_(inside), alpha=inputs.gamma)
        delta.sub_(values)
        if critic_lambda is not None:
            targets = delta.clone()
            target = accumulate(targets, 1 + (inputs.gamma * critic_lambda - 1) * inside, target)
            columns.write(targets.mul_(inside).add_(values), returns, span)
        advantage = accumulate(delta, 1 + (inputs.gamma * lam - 1) * inside, advantage)
        columns.write(delta.mul_(inside), advantages, span)
        if critic_lambda is None:
            columns.write(delta.add_(values), returns, span)
    return AdvantageOutputs(advantages=advantages, returns=returns)


@estimator("reinforce")
def reinforce(inputs: AdvantageInputs) -> AdvantageOutputs:
    """The discounted reward-to-go Σ_k γ^k r_{t+k} over sampled tokens (Williams 1992)."""
    return AdvantageOutputs(advantages=_reward_to_go(inputs))


@estimator("reinforce_moving_baseline")
def reinforce_moving_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """R − b at every token: the response is one action, R its score plus all its token penalties (arXiv 2402.14740 §3).

    b is the mean of R over all responses of *earlier* calls (0 before the first), so that it does not depend on the
    actions it is subtracted from; `outputs.baseline` is the state for the next call.

    Raises:
        ValueError: `baseline` is missing.
    """
    if inputs.baseline is None:
        raise ValueError("reinforce_moving_baseline needs baseline, the state of its running mean; the first is RunningMean()")
    rewards, shard = row_sums(_rewards(inputs)), inputs.shard
    of_all = shard.rows(rewards)[shard.rows(inputs.mask.any(1))]
    return AdvantageOutputs(
        advantages=per_token(inputs, rewards - inputs.baseline.mean), baseline=inputs.baseline.update(of_all)
    )


@estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Σ_k γ^k r_{t+k}, whitened over all sampled tokens of the batch (arXiv 2501.03262); with γ = 1, r + Σ_{i≥t} penalty_i."""
    return AdvantageOutputs(advantages=_reward_to_go(inputs))


@estimator("remax")
def remax(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward-to-go (the score, and any token penalty) less the score of the greedy response (arXiv 2310.10505).

    Raises:
        ValueError: `greedy_scores` is missing.
    """
    if inputs.greedy_scores is None:
        raise ValueError("remax needs greedy_scores, but none were given")
    to_go = discounted_sum(_rewards(inputs), inputs.mask, 1.0)
    return AdvantageOutputs(advantages=(to_go - per_token(inputs, inputs.greedy_scores)).to(inputs.scores.dtype))
