"""Advantages, corrections and KL in the reward, computed where the tokens of some rows are.

`estimate_tokens` is a function of values: a process needs the config, its rows of the batch, their `RowInputs`, and the way to
the rows of others. The driver makes `RowInputs` and takes `TokenOutcome` (`experience/experience.py`); it needs no token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    WHOLE,
    AdvantageInputs,
    AdvantageOutputs,
    Correction,
    RunningMean,
    Shard,
    correction,
    kl_per_token,
    last_of_each_row,
    rewards_of_turns,
    turn_numbers,
)
from megarl.algorithms.advantages import at_first
from megarl.algorithms.catalogue import ESTIMATORS, EstimatorNeeds
from megarl.algorithms.shard import batch_total, row_sums
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.experience.step_parts import AdvantageTerm

COLUMNS_READ = {
    "old_log_probs": "old_log_probs",
    "entropy": "old_entropy",
    "collision": "old_collision",
    "reference_log_probs": "reference_log_probs",
    "teacher_log_probs": "teacher_log_probs",
}
"""Needs of an estimator, and the column of the batch that it is given for each."""


@dataclass(frozen=True, kw_only=True)
class RowInputs:
    """The driver's part of an estimate: what it knows of each of B rows, and the numbers in force in this step."""

    unshaped: Tensor
    """float32 `[B]`: rewards."""
    scores: Tensor
    """float32 `[B]`: those after shaping."""
    greedy_scores: Tensor | None
    """float32 `[B]`: of the greedy response to the same prompt, shaped, for an estimator that needs it."""
    rewards_by_source: Mapping[str, Tensor]
    """By label of a source that judged all rows of the batch, float32 `[B]`."""
    turn_rewards: Sequence[Sequence[float]]
    """Of each row, what the environment gave its turns, with its weight; empty: nothing."""
    turn_states: Sequence[Sequence[int]]
    """Of each row, numbers of the states before its turns, equal in the whole batch for equal states; empty: not named."""
    estimator: str
    """The name of the estimator; a file's path is absolute."""
    needed: EstimatorNeeds
    """Its needs."""
    baseline: RunningMean
    """The mean of earlier rewards."""
    kl_coef: float
    """β of the KL in the reward, where it is there."""
    terms: tuple[AdvantageTerm, ...]
    """What options make of advantages, in order."""
    rewards_are_read: bool
    """Whether an estimator makes advantages of rewards; if not, they start as zeros."""

    def of_rows(self, rows: Sequence[int]) -> RowInputs:
        """Restrict to some rows, in this order: a shard's."""
        places = torch.tensor([*rows], dtype=torch.long)
        return replace(
            self,
            unshaped=self.unshaped[places],
            scores=self.scores[places],
            greedy_scores=None if self.greedy_scores is None else self.greedy_scores[places],
            rewards_by_source={source: given[places] for source, given in self.rewards_by_source.items()},
            turn_rewards=[self.turn_rewards[row] for row in rows],
            turn_states=[self.turn_states[row] for row in rows],
        )


@dataclass(frozen=True, kw_only=True)
class TokenOutcome:
    """Outcome of an estimate, for the driver: of the whole batch, and equal in every shard."""

    metrics: dict[str, float]
    """By their whole names."""
    baseline: RunningMean
    """The mean of earlier rewards, for the next step."""
    kl: float | None
    """Mean KL of a response in nats, where β is steered by it; None: nothing measured it."""
    kl_rows: int
    """Responses in this mean."""
    entropy: float | None
    """Mean entropy of the tokens that are left in the mask, where its bonus is steered; None: nothing measured it."""


def estimate_tokens(config: Config, batch: Batch, rows: RowInputs, shard: Shard = WHOLE) -> TokenOutcome:
    """Add the columns `advantages`, for a critic `returns` and with a correction `correction` to `batch`.

    A response that is alone in its group under a group estimator, that was rejected by the correction, or that was
    truncated where `truncated_responses` is 'mask', leaves the mask, and so every denominator; where it is 'exclude', every
    baseline and running mean too. Tokens that the column `older` names leave the mask once the advantages are there.

    Args:
        config: the run's.
        batch: rows of whole groups, in the batch's order, with `old_log_probs` where they are needed, `reference_log_probs`
            where KL is in the reward, `values` and `values_after` for a critic, `step_rewards` and `step_ends` for process
            rewards. An episode is one row (`JoinedEpisodes`).
        rows: the driver's part of these rows.
        shard: the way to all rows. Every shard must make this call; where one raises, the others wait for it.
    """
    algorithm, columns = config.algorithm, batch.columns
    metrics: dict[str, float] = {}
    turns = turn_numbers(batch.mask)
    if algorithm.truncated_responses == "exclude":
        batch.mask[batch.truncated] = False
    if "step_rewards" in columns:  # what shaping took off or added stands at the last step
        last = last_of_each_row(columns["step_ends"].bool() & batch.mask)
        columns["step_rewards"] += torch.where(last, (rows.scores - rows.unshaped)[:, None], 0)
    if algorithm.rollout_correction and not algorithm.bypasses_old_log_probs:
        metrics |= _correct(config, batch, shard)
    token_penalty, kl, kl_rows = _kl_penalty(config, batch, rows.kl_coef, shard)
    inputs = AdvantageInputs(
        scores=rows.scores,
        token_penalty=token_penalty,
        mask=batch.mask,
        groups=batch.groups,
        values=columns.get("values"),
        truncated=batch.truncated,
        gamma=algorithm.gamma,
        lam=algorithm.gae_lambda,
        eps=algorithm.advantage_eps,
        unbiased=algorithm.unbiased_std,
        normalisation=algorithm.advantage_normalisation,
        bootstrap_truncated=algorithm.truncated_responses == "bootstrap",
        bootstrap_values=columns["values_after"].sum(1) if "values_after" in columns else None,
        baseline=rows.baseline,
        greedy_scores=rows.greedy_scores,
        step_rewards=columns.get("step_rewards"),
        step_ends=columns["step_ends"].bool() if "step_ends" in columns else None,
        rewards_by_source=rows.rewards_by_source,
        reward_weights=config.reward_weights,
        turns=turns,
        turn_rewards=rewards_of_turns(rows.scores, turns, rows.turn_rewards),
        states=_states(rows.turn_states, turns),
        rollout_log_probs=columns["rollout_log_probs"],
        shard=shard,
        **{name: columns[column] for name, column in COLUMNS_READ.items() if getattr(rows.needed, name)},
    )
    outputs = AdvantageOutputs(advantages=torch.zeros(batch.mask.shape))
    if rows.rewards_are_read:
        outputs = estimated(rows.estimator, rows.needed, inputs, algorithm.advantage_args)
    columns["advantages"] = outputs.advantages
    for term in rows.terms:
        columns["advantages"] = term(columns["advantages"], lambda: _sampled_log_probs(config, batch), batch)
    if outputs.returns is not None:
        columns["returns"] = outputs.returns
        metrics |= _explained(outputs.returns, batch, shard)
    if outputs.dropped is not None:
        batch.mask[outputs.dropped] = False
        metrics["reward/lone_responses"] = float(shard.total(outputs.dropped.sum()[None]))
    if algorithm.truncated_responses == "mask":
        batch.mask[batch.truncated] = False
    if "older" in columns:
        batch.mask = batch.mask & (columns["older"] == 0)
    return TokenOutcome(
        metrics=metrics,
        baseline=outputs.baseline or rows.baseline,
        kl=kl,
        kl_rows=kl_rows,
        entropy=mean_entropy(config, batch, shard),
    )


def columns_read(config: Config, rows: RowInputs) -> set[str]:
    """Names of the columns that `estimate_tokens` reads, where there are these."""
    names = {"rollout_log_probs", "old_log_probs", "values", "values_after", "step_rewards", "step_ends", "older"}
    names |= {column for need, column in COLUMNS_READ.items() if getattr(rows.needed, need)}
    if kl_is_in_reward(config):
        names.add("reference_log_probs")
    if config.algorithm.entropy.target is not None:
        names.add("old_entropy")
    return names | {name for term in rows.terms for name in term.columns}


def estimate_part(batch: Batch, shard: Shard, config: Config, rows: RowInputs) -> TokenOutcome:
    """`estimate_tokens` as a `RowWork`."""
    return estimate_tokens(config, batch, rows, shard)


def kl_is_in_reward(config: Config) -> bool:
    """Return whether each token's reward has −β·KL to the reference."""
    return bool(config.algorithm.kl.coef) and config.algorithm.kl.apply_to == "reward"


def mean_entropy(config: Config, batch: Batch, shard: Shard = WHOLE) -> float | None:
    """Mean of the column `old_entropy` over the tokens in the mask, in nats, where the entropy bonus is steered by it.

    None: it is not steered, there is no such column, or no token.
    """
    if config.algorithm.entropy.target is None or "old_entropy" not in batch.columns:
        return None
    tokens = int(shard.total(batch.mask.sum()[None]))
    total = batch_total(row_sums(batch.columns["old_entropy"], batch.mask), shard)
    return float(total) / tokens if tokens else None


def estimated(
    name: str, needed: EstimatorNeeds, inputs: AdvantageInputs, arguments: Mapping[str, Any] | None = None
) -> AdvantageOutputs:
    """Call the estimator `name` and give its answer to `inputs` and `arguments` of the config.

    Raises:
        ConfigError: it is a user's own, and raised, or answered something else than one number per token.
    """
    arguments = arguments or {}
    if name not in ESTIMATORS:
        from megarl.experience.own_estimator import own_estimate

        return own_estimate(name, needed, inputs, arguments)
    estimator: Callable[..., AdvantageOutputs] = ADVANTAGES.resolve(name, arguments)
    return estimator(inputs, **arguments)


def _sampled_log_probs(config: Config, batch: Batch) -> Tensor:
    """The policy's at the start of the step; the engine's where no pass computes them (`bypass`)."""
    return batch.columns["rollout_log_probs" if config.algorithm.bypasses_old_log_probs else "old_log_probs"]


def _correct(config: Config, batch: Batch, shard: Shard) -> dict[str, float]:
    """Set the column `correction` and the mask; metrics."""
    columns, rules = batch.columns, [Correction(**rule.model_dump()) for rule in config.algorithm.rollout_correction]
    weights, kept, statistics = correction(columns["old_log_probs"], columns["rollout_log_probs"], batch.mask, rules, shard)
    columns["correction"], batch.mask = weights, kept
    return {f"correction/{name}": value for name, value in statistics.items()}


def _kl_penalty(config: Config, batch: Batch, coef: float, shard: Shard) -> tuple[Tensor, float | None, int]:
    """−β·KL of every token `[b, T]` where KL belongs to the reward, else zeros; where β is steered, the mean KL of the batch's
    responses with sampled tokens, and their number."""
    if not kl_is_in_reward(config):
        return torch.zeros(batch.mask.shape), None, 0
    settings, sampled = config.algorithm.kl, _sampled_log_probs(config, batch)
    kl = kl_per_token(sampled, batch.columns["reference_log_probs"], settings.estimator) * batch.mask
    measured, responses = None, 0
    if settings.target is not None:
        responses = int(shard.total(batch.mask.any(1).sum()[None]))
        total = float(batch_total(row_sums(kl), shard))
        measured = total / responses if responses else None
    return -coef * kl, measured, responses


def _states(named: Sequence[Sequence[int]], turns: Tensor) -> Tensor:
    """Number of the state before the turn of each sampled token, int64 `[b, T]` as `turns`; −1 where none is named."""
    states = torch.full(turns.shape, -1)
    for row, of_row in enumerate(named):
        if len(of_row):
            states[row] = torch.where(turns[row] >= 0, torch.tensor(of_row)[turns[row].clamp(min=0)], -1)
    return states


def _explained(returns: Tensor, batch: Batch, shard: Shard) -> dict[str, float]:
    """`critic/explained_variance`: 1 - Var(returns - values) / Var(returns) over the sampled tokens; none of equal returns."""
    if "values" not in batch.columns:
        return {}
    mask, errors = batch.mask, returns - batch.columns["values"]
    known = torch.stack([mask.sum(1).double(), *(at_first(x, mask).double() for x in (returns, errors))], 1)
    tokens, first_returns, first_errors = shard.rows(known).T
    some = tokens.nonzero().squeeze(1)
    if not len(some):
        return {}

    def moments(x: Tensor, origin: Tensor) -> list[Tensor]:
        distance = x.double() - origin  # from one of them: exactly 0 where all are equal
        return [row_sums(distance, mask), row_sums(distance.square_(), mask)]

    of_rows = [*moments(returns, first_returns[some[0]]), *moments(errors, first_errors[some[0]])]
    mean, squares, mean_error, squared_errors = (batch_total(torch.stack(of_rows, 1), shard) / tokens.sum()).tolist()
    spread = squares - mean * mean
    return {"critic/explained_variance": 1 - (squared_errors - mean_error * mean_error) / spread} if spread > 0 else {}
