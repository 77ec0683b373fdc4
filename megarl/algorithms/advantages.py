"""The shared part of advantage estimators: inputs, outputs, the registry, and recursions and whitening over tokens.

Formulas and sources: docs/methods.md#advantages.

Rows are responses, columns response tokens. Only tokens in the mask (sampled by the policy) take part: the others are
skipped by every recursion, mean and standard deviation, and their advantage is 0. A row without sampled tokens takes
part in nothing, so its score counts in no mean either. Sums run in float64, a block of columns at a time, so that no
`[B, T]` tensor is ever held in float64; results have the dtype of the scores.

The rows may be a shard of the batch (`inputs.shard`): what an estimator answers for a row then is, bit for bit, what it
answers where all rows are in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.catalogue import ESTIMATORS, EstimatorNeeds
from megarl.algorithms.registry import Registry
from megarl.algorithms.shard import WHOLE, Shard, sum_of_blocks
from megarl.algorithms.user_algorithms import load_estimator

COLUMNS = 128
"""Columns that are converted to float64 at a time."""


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
    """The inputs of estimators; `grpo` and its like need only `scores`, `mask` and `groups`."""

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
    """Discount per token (`gae`, `reinforce`, `reinforce_plus_plus`)."""
    lam: float = 1.0
    """λ of `gae`, unless it is told another."""
    eps: float = 1e-6
    """Added to every standard deviation that is divided by."""
    unbiased: bool = True
    """Standard deviations have n−1 in the denominator (true) or n (false)."""
    normalisation: str | None = None
    """How advantages are normalised, one of `NORMALISATIONS`; None: as the estimator does it by itself."""
    bootstrap_truncated: bool = False
    """`gae`: V after the last token of a truncated response is `bootstrap_values`, not 0."""
    bootstrap_values: Tensor | None = None
    """float `[B]`: V after the last token."""
    baseline: RunningMean | None = None
    """The state of `reinforce_moving_baseline`; `RunningMean()` at the start of a run."""
    greedy_scores: Tensor | None = None
    """float `[B]`: score of the greedy response to the same prompt (`remax`)."""
    step_rewards: Tensor | None = None
    """float `[B, T]`: reward of the step that ends at this token, read where `step_ends` (`grpo_process`)."""
    step_ends: Tensor | None = None
    """bool `[B, T]`: tokens that end a step; those outside the mask take no part (`grpo_process`)."""
    rewards_by_source: Mapping[str, Tensor] = field(default_factory=dict)
    """By label of a source of reward, float `[B]`: what it gave each response, without weight and shaping."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """By label of a source of reward, its weight in the sum of all (`gdpo`)."""
    turns: Tensor | None = None
    """int64 `[B, T]`: which turn of the policy each sampled token is in, from 0; −1 at the others."""
    turn_rewards: Tensor | None = None
    """float `[B, T]`: reward of the turn that ends at this token, 0 elsewhere; a response's sum to its score (`turn_rloo`,
    `gigpo`)."""
    states: Tensor | None = None
    """int64 `[B, T]`: number of the state before the turn that a sampled token is in, equal for equal states; −1 where nobody
    named it (`gigpo`)."""
    rollout_log_probs: Tensor | None = None
    """float `[B, T]`: the engine's log-probs, as it sampled."""
    old_log_probs: Tensor | None = None
    """float `[B, T]`: the policy's log-probs at the start of the step."""
    entropy: Tensor | None = None
    """float `[B, T]`: its entropy before each token."""
    collision: Tensor | None = None
    """float `[B, T]`: Σ_v π(v)² before each token, over the vocabulary (`optimal_token_baseline`)."""
    reference_log_probs: Tensor | None = None
    """float `[B, T]`: the reference's log-probs of the sampled tokens."""
    teacher_log_probs: Tensor | None = None
    """float `[B, T]`: the teacher's."""
    shard: Shard = WHOLE
    """The way to the rows of other processes: the tensors above are of whole groups, here."""


@dataclass(kw_only=True)
class AdvantageOutputs:
    """The outputs of estimators; the caller takes the rows in `dropped` out of its loss mask and counts them."""

    advantages: Tensor
    """`[B, T]`, 0 outside the mask."""
    returns: Tensor | None = None
    """`[B, T]`, the critic's targets (`gae`), 0 outside the mask."""
    dropped: Tensor | None = None
    """bool `[B]`: responses whose group is too small for a group estimator: nothing to compare them with."""
    baseline: RunningMean | None = None
    """The next state of `reinforce_moving_baseline`."""


Estimator = Callable[..., AdvantageOutputs]
"""`AdvantageInputs`, and by name what the config gives it in `algorithm.advantage_args`, → `AdvantageOutputs`."""
ADVANTAGES: Registry[Estimator] = Registry("advantage", load_estimator)


def token_rewards(scores: Tensor, token_penalty: Tensor, mask: Tensor) -> Tensor:
    """Reward of each token `[B, T]`: the penalty, plus the score at the last sampled token; 0 outside the mask.

    Args:
        scores: float `[B]`.
        token_penalty: float `[B, T]`.
        mask: bool `[B, T]`; a row without sampled tokens gets no score.

    Returns:
        The wider dtype of `scores` and `token_penalty`.
    """
    rewards = torch.where(mask, token_penalty, 0).to(torch.promote_types(scores.dtype, token_penalty.dtype))
    rows = mask.any(1).nonzero().squeeze(1)
    if len(rows):
        last = mask.shape[1] - 1 - mask.flip(1).to(torch.uint8).argmax(1)
        rewards[rows, last[rows]] += scores[rows].to(rewards.dtype)
    return rewards


def last_of_each_row(mask: Tensor) -> Tensor:
    """bool `[B, T]`: the last place of each row in `mask` bool `[B, T]`."""
    return mask & (mask.flip(1).long().cumsum(1).flip(1) == 1)


def turn_numbers(mask: Tensor) -> Tensor:
    """The turn of each sampled token, int64 `[B, T]`, from 0; −1 outside `mask` bool `[B, T]`.

    A turn is a run of sampled tokens: between two of the policy's turns there are tokens that it did not sample.
    """
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return torch.where(mask, starts.long().cumsum(1) - 1, -1)


def per_token(inputs: AdvantageInputs, per_response: Tensor) -> Tensor:
    """`per_response` `[B]` at every sampled token `[B, T]`, in the dtype of the scores."""
    return torch.where(inputs.mask, per_response.to(inputs.scores.dtype)[:, None], 0)


def masked_whiten(
    x: Tensor,
    mask: Tensor,
    *,
    unbiased: bool = True,
    eps: float = 1e-6,
    groups: Tensor | None = None,
    centre: bool = True,
    shard: Shard = WHOLE,
) -> Tensor:
    """(x − mean) / (std + eps) with mean and std over all tokens in `mask`; 0 outside it and where all values are equal.

    Args:
        x: float `[B, T]`.
        mask: bool `[B, T]`.
        unbiased: n−1 (true) or n (false) in the variance's denominator.
        eps: added to the standard deviation.
        groups: int64 `[B]`; mean and std are over the tokens of the rows with one number. None: over those of all rows.
        centre: false: x / (rms + eps), with rms the root of the mean of squares, so that zeros stay 0.
        shard: the way to the other rows of the global batch; with `groups` nothing of them is asked.

    Returns:
        `[B, T]` in the dtype of `x`.
    """
    out = torch.zeros_like(x)
    spans = [slice(start, start + COLUMNS) for start in range(0, x.shape[1], COLUMNS)]
    in_rows = torch.zeros(len(x), dtype=torch.long)
    for span in spans:  # of the whole mask it would be held as int64
        in_rows += mask[:, span].sum(1)
    if groups is None:
        tokens_of_all = shard.rows(in_rows)
        index = torch.zeros_like(tokens_of_all)
    else:
        shard, tokens_of_all = WHOLE, in_rows
        index = groups.unique(return_inverse=True)[1]
    count = int(index.max()) + 1 if len(index) else 0
    tokens = shard.own(group_total(tokens_of_all, index, count))

    def apart(span: slice, origin: Tensor) -> Tensor:
        return x[:, span].to(torch.float64, copy=True).sub_(origin[:, None]).masked_fill_(~mask[:, span], 0)

    def total(power: int, origin: Tensor) -> Tensor:
        of_rows = sum_of_blocks((apart(span, origin).pow_(power) for span in spans), *x.shape)
        return shard.own(group_total(shard.rows(of_rows), index, count))

    origin = torch.zeros(len(x), dtype=torch.float64)
    if centre:
        first = shard.rows(torch.where(in_rows > 0, at_first(x, mask).double(), torch.inf))
        lowest = first.new_zeros(count).scatter_reduce(0, index, first, "amin", include_self=False)
        origin = shard.own(lowest[index])
        origin = torch.where(origin.isfinite(), origin, 0)
        origin += total(1, origin) / tokens.clamp(min=1)  # exact where all are equal, so that the squares are 0
    squares = total(2, origin)
    freedom = tokens - int(unbiased and centre)
    deviation = torch.where(squares == 0, torch.inf, (squares / freedom.clamp(min=1)).sqrt() + eps)
    for span in spans:
        out[:, span] = apart(span, origin).div_(deviation[:, None])
    return out


def at_first(x: Tensor, mask: Tensor) -> Tensor:
    """`x` `[B, T]` at the first place of each row in `mask` bool `[B, T]`, `[B]`; anything in a row without one."""
    if not x.shape[1]:
        return x.new_zeros(len(x))
    return x.gather(1, mask.to(torch.uint8).argmax(1, keepdim=True)).squeeze(1)


def group_total(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of `x` `[N]` over each one's group by `index` int64 `[N]`, of `count` groups, `[N]`."""
    return x.new_zeros(count).index_add(0, index, x)[index]


def normalised(outputs: AdvantageOutputs, inputs: AdvantageInputs, needed: EstimatorNeeds) -> AdvantageOutputs:
    """`outputs` with its advantages normalised as `inputs.normalisation` says, or as the estimator does it by itself.

    `batch` and `group` whiten over the batch or the group; `batch_rms` and `group_rms` only divide by the root of the mean of
    squares, so that a baseline stays where it is. Statistics are over sampled tokens; of an estimator that gives one number
    to a response (`needed.per_response`), over responses. Dropped responses count in none. Returns are left as they are.
    """
    mode = needed.normalisation if inputs.normalisation is None else inputs.normalisation
    if mode == "none":
        return outputs
    kept = inputs.mask if outputs.dropped is None else inputs.mask & ~outputs.dropped[:, None]
    how: dict[str, Any] = {
        "unbiased": inputs.unbiased,
        "eps": inputs.eps,
        "groups": inputs.groups if mode.startswith("group") else None,
        "centre": not mode.endswith("_rms"),
        "shard": inputs.shard,
    }
    if not needed.per_response:
        return replace(outputs, advantages=masked_whiten(outputs.advantages, kept, **how))
    of_row = at_first(outputs.advantages, kept)[:, None]
    scaled = masked_whiten(of_row, kept.any(1, keepdim=True), **how)
    return replace(outputs, advantages=torch.where(kept, scaled, 0))


def estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Decorator that files a built-in estimator under `name`, with its normalisation behind it."""

    def file(function: Estimator) -> Estimator:
        @wraps(function)
        def estimate(inputs: AdvantageInputs, **arguments: Any) -> AdvantageOutputs:
            return normalised(function(inputs, **arguments), inputs, ESTIMATORS[name])

        return ADVANTAGES.register(name)(estimate)

    return file


class BackwardColumns:
    """The columns of `[B, T]` tensors from last to first, a block at a time, transposed to `[columns, B]` in float64.

    A step of a recursion over time then is one operation on contiguous memory for the whole batch.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        starts = range(0, mask.shape[1], COLUMNS)
        self.spans = [slice(start, min(start + COLUMNS, mask.shape[1])) for start in reversed(starts)]

    def zeros(self) -> Tensor:
        """float64 `[B]`, the state of a recursion before it starts."""
        return torch.zeros(len(self.mask), dtype=torch.float64, device=self.mask.device)

    def read(self, x: Tensor, span: slice) -> Tensor:
        """A fresh float64 `[columns, B]` copy of these columns of `x` `[B, T]`, 0 outside the mask."""
        block = torch.where(self.mask[:, span], x[:, span].detach(), 0.0).double()
        return block.t().contiguous()

    def inside(self, span: slice) -> Tensor:
        """The mask of these columns, float64 `[columns, B]`: products with it are several times faster than filling."""
        return self.mask[:, span].double().t().contiguous()

    def write(self, block: Tensor, out: Tensor, span: slice) -> None:
        """Put float64 `[columns, B]` into these columns of `out` `[B, T]`, in its dtype."""
        out[:, span] = block.t().contiguous()


def accumulate(x: Tensor, factors: Tensor, following: Tensor) -> Tensor:
    """S_t = x_t + factor_t·S_{t+1}, from the last row to the first, written over `x`; returns a copy of S of the first row.

    Args:
        x: float64 `[columns, B]`.
        factors: float64 `[columns, B]`.
        following: float64 `[B]`, S after the last row.
    """
    for row, factor in zip(reversed(x.unbind()), reversed(factors.unbind()), strict=True):
        following = row.addcmul_(factor, following)
    return following.clone()  # not a view: what the caller then does to `x` must not reach the next block


def discounted_sum(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """S_t = x_t + factor·S_next over the tokens in `mask`, next being the next such token; 0 outside it. `[B, T]`."""
    out = torch.zeros_like(x)
    columns = BackwardColumns(mask)
    following = columns.zeros()
    for span in columns.spans:
        total, inside = columns.read(x, span), columns.inside(span)
        following = accumulate(total, 1 + (factor - 1) * inside, following)
        columns.write(total.mul_(inside), out, span)
    return out
