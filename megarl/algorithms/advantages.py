"""Advantages and returns of a whole step's responses (METHODS §3), by name.

Rows are responses, columns response tokens. Only tokens in the mask (sampled by the policy) take part: the others are
skipped by every recursion, mean and standard deviation, and their advantage is 0. A row without sampled tokens takes
part in nothing, so its score counts in no mean either. Sums run in float64; results have the dtype of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.registry import Registry
from megarl.errors import ConfigError


@dataclass(frozen=True)
class RunningMean:
    """The mean of all values so far. `update` returns the next state; a checkpoint keeps both fields."""

    count: int = 0
    mean: float = 0.0

    def update(self, values: Tensor) -> RunningMean:
        """The state after `values` (any shape)."""
        if values.numel() == 0:
            return self
        count = self.count + values.numel()
        return RunningMean(count, self.mean + float((values.double() - self.mean).sum()) / count)


@dataclass(kw_only=True)
class AdvantageInputs:
    """What estimators read; `grpo` and its like need only `scores`, `mask` and `groups`."""

    scores: Tensor
    """float `[B]`: reward of each response, after clipping and shaping."""
    token_penalty: Tensor
    """float `[B, T]`: added to the reward of each token (−β·KL); zeros if there is none."""
    mask: Tensor
    """bool `[B, T]`: tokens that the policy sampled."""
    groups: Tensor
    """int64 `[B]`: responses with equal numbers answer the same prompt, wherever they stand."""
    values: Tensor | None = None
    """float `[B, T]`: the critic's V before each token is chosen (`gae`)."""
    truncated: Tensor | None = None
    """bool `[B]`: responses cut by the length limit."""
    gamma: float = 1.0
    """Discount per token (`gae`, `reinforce`)."""
    lam: float = 1.0
    """λ of `gae`."""
    eps: float = 1e-6
    """Added to every standard deviation that is divided by."""
    unbiased: bool = True
    """Standard deviations have n−1 in the denominator (true) or n (false)."""
    bootstrap_truncated: bool = False
    """`gae`: V after the last token of a truncated response is `bootstrap_values`, not 0."""
    bootstrap_values: Tensor | None = None
    """float `[B]`: V after the last token."""
    baseline: RunningMean | None = None
    """The state of `reinforce_moving_baseline`; `RunningMean()` at the start of a run."""
    greedy_scores: Tensor | None = None
    """float `[B]`: score of the greedy response to the same prompt (`remax`)."""


@dataclass(kw_only=True)
class AdvantageOutputs:
    """What estimators answer; the caller takes the rows in `dropped` out of its loss mask and counts them."""

    advantages: Tensor
    """`[B, T]`, 0 outside the mask."""
    returns: Tensor | None = None
    """`[B, T]`, the critic's targets (`gae`), 0 outside the mask."""
    dropped: Tensor | None = None
    """bool `[B]`: responses that are alone in their group under a group estimator: nothing to compare them with."""
    baseline: RunningMean | None = None
    """The next state of `reinforce_moving_baseline`."""


ADVANTAGES: Registry[Callable[[AdvantageInputs], AdvantageOutputs]] = Registry("advantage")


def token_rewards(scores: Tensor, token_penalty: Tensor, mask: Tensor) -> Tensor:
    """Reward of each token `[B, T]`: the penalty, plus the score at the last sampled token; 0 outside the mask (METHODS §6).

    Args:
        scores: float `[B]`.
        token_penalty: float `[B, T]`.
        mask: bool `[B, T]`; a row without sampled tokens gets no score.
    """
    after = mask.flip(1).cumsum(1).flip(1)  # sampled tokens from here on
    last = mask & (after == 1)
    return torch.where(mask, token_penalty, 0) + torch.where(last, scores[:, None], 0)


def masked_whiten(x: Tensor, mask: Tensor, unbiased: bool = True, eps: float = 1e-6) -> Tensor:
    """(x − mean) / (std + eps) with mean and std over all tokens in `mask`; 0 outside it and where all values are equal.

    Args:
        x: float `[B, T]`, of the whole global batch.
        mask: bool `[B, T]`.
        unbiased: n−1 (true) or n (false) in the variance's denominator.
        eps: added to the standard deviation.
    """
    chosen = x[mask].double()
    if len(chosen) == 0 or bool(chosen.min() == chosen.max()):
        return torch.zeros_like(x)
    white = (x.double() - chosen.mean()) / (chosen.std(correction=int(unbiased)) + eps)
    return torch.where(mask, white, 0).to(x.dtype)


def discounted_sum(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """S_t = x_t + factor·S_next over the tokens in `mask`, next being the next such token; 0 outside it. `[B, T]`."""
    out = torch.zeros_like(x)
    running = torch.zeros_like(x[:, 0]) if x.shape[1] else x.new_zeros(len(x))
    for t in reversed(range(x.shape[1])):
        running = torch.where(mask[:, t], x[:, t] + factor * running, running)
        out[:, t] = torch.where(mask[:, t], running, 0)
    return out


def next_values(values: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """V at the next sampled token of each token `[B, T]`; at the last one, `last` `[B]`."""
    out = torch.zeros_like(values)
    following = last
    for t in reversed(range(values.shape[1])):
        out[:, t] = following
        following = torch.where(mask[:, t], values[:, t], following)
    return out


def _per_token(inputs: AdvantageInputs, per_response: Tensor) -> Tensor:
    """`per_response` `[B]` at every sampled token `[B, T]`."""
    return torch.where(inputs.mask, per_response[:, None], 0).to(inputs.scores.dtype)


def _rewards(inputs: AdvantageInputs) -> Tensor:
    return token_rewards(inputs.scores.double(), inputs.token_penalty.double(), inputs.mask)


@ADVANTAGES.register("gae")
def gae(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A_t = Σ_b (γλ)^b δ_{t+b} with δ_t = r_t + γV_next − V_t, returns A + V (arXiv 1506.02438).

    "Next" is the next sampled token. After the last one V is 0, or `bootstrap_values` for truncated responses if
    `bootstrap_truncated`.

    Raises:
        ValueError: `values` is missing, or `truncated` or `bootstrap_values` where bootstrapping needs them.
    """
    if inputs.values is None:
        raise ValueError("gae needs values, but none were given")
    values = torch.where(inputs.mask, inputs.values, 0).double()
    last = values.new_zeros(len(values))
    if inputs.bootstrap_truncated:
        if inputs.truncated is None or inputs.bootstrap_values is None:
            raise ValueError("bootstrap_truncated needs truncated and bootstrap_values, but one of them is missing")
        last = torch.where(inputs.truncated, inputs.bootstrap_values.double(), 0)
    delta = _rewards(inputs) + inputs.gamma * next_values(values, inputs.mask, last) - values
    advantages = discounted_sum(delta, inputs.mask, inputs.gamma * inputs.lam)
    dtype = inputs.scores.dtype
    return AdvantageOutputs(advantages=advantages.to(dtype), returns=(advantages + values).to(dtype))


@ADVANTAGES.register("reinforce")
def reinforce(inputs: AdvantageInputs) -> AdvantageOutputs:
    """The discounted reward-to-go Σ_k γ^k r_{t+k} over sampled tokens (Williams 1992)."""
    return AdvantageOutputs(advantages=discounted_sum(_rewards(inputs), inputs.mask, inputs.gamma).to(inputs.scores.dtype))


@ADVANTAGES.register("reinforce_moving_baseline")
def reinforce_moving_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """R − b at every token: the response is one action, R its score plus all its token penalties (arXiv 2402.14740 §3).

    b is the mean of R over all responses of *earlier* calls (0 before the first), so that it does not depend on the
    actions it is subtracted from; `outputs.baseline` is the state for the next call.

    Raises:
        ValueError: `baseline` is missing.
    """
    if inputs.baseline is None:
        raise ValueError("reinforce_moving_baseline needs baseline, the state of its running mean; the first is RunningMean()")
    rewards = _rewards(inputs).sum(1)
    sampled = inputs.mask.any(1)
    return AdvantageOutputs(
        advantages=_per_token(inputs, rewards - inputs.baseline.mean), baseline=inputs.baseline.update(rewards[sampled])
    )


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A_t = r + Σ_{i≥t} penalty_i, whitened over all sampled tokens of the batch (arXiv 2501.03262). γ plays no part."""
    advantages = discounted_sum(_rewards(inputs), inputs.mask, 1.0)
    return AdvantageOutputs(
        advantages=masked_whiten(advantages, inputs.mask, inputs.unbiased, inputs.eps).to(inputs.scores.dtype)
    )


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """`reinforce_plus_plus` of the score less its group's mean; responses alone in their group are dropped first."""
    group = _group_statistics(inputs)
    kept = inputs.mask & ~group.alone[:, None]
    rewards = token_rewards(group.centred, inputs.token_penalty.double(), kept)
    advantages = masked_whiten(discounted_sum(rewards, kept, 1.0), kept, inputs.unbiased, inputs.eps)
    return AdvantageOutputs(advantages=advantages.to(inputs.scores.dtype), dropped=group.alone)


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """(r − mean) / (std + eps) of the group, at every token (outcome form, arXiv 2402.03300 §4.1.2).

    Exactly 0 in a group whose scores are all equal. A response alone in its group gets 0 and is marked in
    `outputs.dropped`: the caller takes it out of its mask, so that it counts in no denominator, and counts it.

    Raises:
        ConfigError: there is a token penalty, which this estimator has no place for.
    """
    _refuse_token_penalty(inputs, "grpo")
    group = _group_statistics(inputs)
    freedom = (group.size - int(inputs.unbiased)).clamp(min=1)
    advantages = group.centred / ((group.squares / freedom).sqrt() + inputs.eps)
    return AdvantageOutputs(advantages=_per_token(inputs, torch.where(group.tied, 0, advantages)), dropped=group.alone)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """r − mean of the group, at every token (arXiv 2503.20783). Ties, lone responses and errors as in `grpo`."""
    _refuse_token_penalty(inputs, "dr_grpo")
    group = _group_statistics(inputs)
    return AdvantageOutputs(advantages=_per_token(inputs, group.centred), dropped=group.alone)


@ADVANTAGES.register("rloo")
def rloo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """r − mean of the *other* responses of the group, at every token (arXiv 2402.14740).

    Computed as (r − mean)·G/(G−1), which is the same. Ties, lone responses and errors as in `grpo`.
    """
    _refuse_token_penalty(inputs, "rloo")
    group = _group_statistics(inputs)
    advantages = group.centred * group.size / (group.size - 1).clamp(min=1)
    return AdvantageOutputs(advantages=_per_token(inputs, advantages), dropped=group.alone)


@ADVANTAGES.register("remax")
def remax(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward-to-go (the score, and any token penalty) less the score of the greedy response (arXiv 2310.10505).

    Raises:
        ValueError: `greedy_scores` is missing.
    """
    if inputs.greedy_scores is None:
        raise ValueError("remax needs greedy_scores, but none were given")
    to_go = discounted_sum(_rewards(inputs), inputs.mask, 1.0)
    return AdvantageOutputs(
        advantages=torch.where(inputs.mask, to_go - inputs.greedy_scores.double()[:, None], 0).to(inputs.scores.dtype)
    )


@dataclass(frozen=True)
class _GroupStatistics:
    """Of each response's group, `[B]`: r − mean and its sum of squares (float64), members, whether all agree, whether alone.

    Only responses with sampled tokens are members; the others have r − mean = 0 and are not alone.
    """

    centred: Tensor
    squares: Tensor
    size: Tensor
    tied: Tensor
    alone: Tensor


def _group_statistics(inputs: AdvantageInputs) -> _GroupStatistics:
    member = inputs.mask.any(1)
    scores = torch.where(member, inputs.scores.double(), 0)
    _, index = inputs.groups.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(groups).index_add(0, index, x)

    def extreme(reduction: str, empty: float) -> Tensor:
        start = scores.new_full((groups,), empty)
        return start.scatter_reduce(0, index, torch.where(member, scores, empty), reduction)[index]

    size = total(member.long())[index]
    tied = extreme("amin", float("inf")) == extreme("amax", float("-inf"))
    mean = total(scores)[index] / size.clamp(min=1)
    centred = torch.where(member & ~tied, scores - mean, 0)
    return _GroupStatistics(centred, total(centred * centred)[index], size, tied, member & (size == 1))


def _refuse_token_penalty(inputs: AdvantageInputs, name: str) -> None:
    if bool((inputs.token_penalty[inputs.mask] != 0).any()):
        raise ConfigError(
            f"the KL penalty is in the reward, but advantage '{name}' gives every token of a response the same value; "
            "put it in the loss (algorithm.kl.where: loss)"
        )
