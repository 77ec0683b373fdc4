"""Advantages that compare the responses of one prompt with each other (docs/methods.md#advantages).

Groups are found by their number, never by position. Exactly 0 in a group whose scores are all equal. A response alone in
its group gets 0 and is marked in `outputs.dropped`: the caller takes it out of its mask, so that it counts in no
denominator, and counts it.

What is compared is R, a response's score plus all its token penalties (−β·KL): one number for one action, as in
arXiv 2402.14740. Where a docstring says that advantages are divided or whitened, that is the estimator's normalisation if
`inputs.normalisation` is None.
"""

from __future__ import annotations

import torch

from megarl.algorithms.advantages import (
    AdvantageInputs,
    AdvantageOutputs,
    discounted_sum,
    estimator,
    per_token,
    token_rewards,
)
from megarl.algorithms.group_statistics import GroupStatistics, response_statistics


@estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward-to-go of the score less its group's mean, whitened over the batch (arXiv 2501.03262).

    Token penalties stand at their tokens. Responses alone in their group are dropped first.
    """
    group = response_statistics(inputs, inputs.scores.double())
    kept = inputs.mask & ~group.alone[:, None]
    centred = group.centred.to(inputs.scores.dtype)
    to_go = discounted_sum(token_rewards(centred, inputs.token_penalty, kept), kept, 1.0)
    return AdvantageOutputs(advantages=to_go.to(inputs.scores.dtype), dropped=group.alone)


@estimator("grpo")
def grpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """R − mean of the group, divided by std + eps of the group, at every token (outcome form, arXiv 2402.03300 §4.1.2)."""
    return _less_group_mean(inputs)


@estimator("grpo_process")
def grpo_process(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Σ_{index(j) ≥ t} r̃ of the token's own step and those after it (process form, arXiv 2402.03300 §4.1.3).

    r̃ = (r − mean(R)) / (std(R) + eps) with R the rewards of all steps of all responses of the group; 0 if they are all
    equal. Token penalties count to the step that they are in. A step end outside the mask takes no part; after a response's
    last step its tokens get 0. `scores` are not read.

    Raises:
        ValueError: `step_rewards` or `step_ends` is missing.
    """
    if inputs.step_rewards is None or inputs.step_ends is None:
        raise ValueError("grpo_process needs step_rewards and step_ends, but one of them is missing")
    group = response_statistics(inputs)
    ends = inputs.step_ends & inputs.mask & ~group.alone[:, None]
    rows, _ = ends.nonzero(as_tuple=True)
    so_far = torch.where(inputs.mask, inputs.token_penalty, 0).cumsum(1)[ends].double()
    before = torch.cat([so_far.new_zeros(1), so_far[:-1]])[: len(so_far)]
    is_first = torch.cat([rows.new_full((1,), -1), rows[:-1]])[: len(rows)] != rows
    rewards = inputs.step_rewards[ends].double() + so_far - torch.where(is_first, 0, before)
    steps = GroupStatistics.of(rewards, group.index[rows], group.count)
    standardised = torch.zeros_like(inputs.step_rewards)
    standardised[ends] = steps.standardised(inputs).to(standardised.dtype)
    advantages = discounted_sum(standardised, inputs.mask, 1.0)
    return AdvantageOutputs(advantages=advantages.to(inputs.scores.dtype), dropped=group.alone)


@estimator("dr_grpo")
def dr_grpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """R − mean of the group, at every token (arXiv 2503.20783)."""
    return _less_group_mean(inputs)


@estimator("rloo")
def rloo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """R − mean of the *other* responses of the group, at every token (arXiv 2402.14740).

    Computed as (R − mean)·G/(G−1), which is the same.
    """
    group = response_statistics(inputs)
    advantages = group.centred * group.size / (group.size - 1).clamp(min=1)
    return AdvantageOutputs(advantages=per_token(inputs, advantages), dropped=group.alone)


@estimator("opo")
def opo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """R − Σ|o_j|R_j / Σ|o_j| of the group, at every token (arXiv 2505.23585 eq. 5).

    The length-weighted mean is the baseline of least variance where a response's squared gradient norm grows with its
    number of sampled tokens |o_j|. Meant for exact on-policy steps.
    """
    group = response_statistics(inputs)
    lengths = inputs.mask.sum(1)
    # Weighing distances from the plain mean leaves the same baseline and keeps large scores exact.
    shift = group.total(lengths * group.centred) / group.total(lengths).clamp(min=1)
    advantages = torch.where(inputs.mask.any(1) & ~group.tied, group.centred - shift, 0)
    return AdvantageOutputs(advantages=per_token(inputs, advantages), dropped=group.alone)


@estimator("gpg")
def gpg(inputs: AdvantageInputs) -> AdvantageOutputs:
    """α·(R − mean of the group) with α = B/(B − M), at every token (arXiv 2504.02546 §2, F_norm = 1).

    B is the number of responses of the batch and M of those in tied groups, which have no gradient but do count in the
    denominators: α gives the mean gradient of the others. Dropped responses and those without sampled tokens are in neither.
    """
    group = response_statistics(inputs)
    compared = inputs.mask.any(1) & ~group.alone
    counts = torch.stack([compared.sum(), (compared & ~group.tied).sum()])
    responses, live = inputs.shard.total(counts).tolist()
    alpha = responses / max(live, 1)
    return AdvantageOutputs(advantages=per_token(inputs, alpha * group.centred), dropped=group.alone)


@estimator("gdpo")
def gdpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Σ_k w_k·(r_k − mean of the group)/(std of the group + eps) over the sources of reward, whitened over the responses of the
    batch (arXiv 2601.05242).

    Reads `rewards_by_source` and `reward_weights` in place of `scores` and token penalties.

    Raises:
        ValueError: there are no weights, or a source that has one did not judge every response.
    """
    if not inputs.reward_weights or not inputs.reward_weights.keys() <= inputs.rewards_by_source.keys():
        raise ValueError("gdpo needs reward_weights, and rewards_by_source of every source in them, but one of them is missing")
    total = torch.zeros(len(inputs.scores), dtype=torch.float64)
    for source, weight in inputs.reward_weights.items():
        group = response_statistics(inputs, inputs.rewards_by_source[source].double())
        total += weight * group.standardised(inputs)
    return AdvantageOutputs(advantages=per_token(inputs, total), dropped=group.alone)


def _less_group_mean(inputs: AdvantageInputs) -> AdvantageOutputs:
    group = response_statistics(inputs)
    return AdvantageOutputs(advantages=per_token(inputs, group.centred), dropped=group.alone)
