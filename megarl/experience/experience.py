"""From rewards to advantages and loss weights: the driver's part of docs/methods.md, one number per row, and what a run
remembers of it. The part of the tokens is `experience/estimation.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import (
    AdaptiveEntropy,
    AdaptiveKl,
    AdaptivePenalty,
    RewardNormaliser,
    RunningMean,
    clip_rewards,
    length_penalty,
    overlong_penalty,
    row_weights,
)
from megarl.algorithms.catalogue import EstimatorNeeds
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.data.sample import EPISODE_REWARD, Sample
from megarl.experience.estimation import RowInputs, TokenOutcome, kl_is_in_reward
from megarl.experience.step_parts import StepPart
from megarl.system.user_code import absolute_name


@dataclass(frozen=True)
class RewardStatistics:
    """Statistics of a step's rewards: mean, standard deviation, and the share of groups whose rewards all agree."""

    mean: float
    std: float
    uniform_groups: float


def reward_statistics(scores: Tensor, groups: Tensor) -> RewardStatistics:
    """`scores` float `[B]`, `groups` int64 `[B]`."""
    numbers, index = groups.unique(return_inverse=True)
    highest, lowest = (
        scores.new_zeros(len(numbers)).scatter_reduce(0, index, scores, which, include_self=False) for which in ("amax", "amin")
    )
    tied = float((highest == lowest).sum()) / max(len(numbers), 1)
    return RewardStatistics(float(scores.mean()), float(scores.std(correction=0)), tied)


def group_rewards(samples: Sequence[Sample], rewards: Sequence[float]) -> list[list[tuple[Sample, float]]]:
    """Samples with their rewards, one list per group id, in order of first appearance."""
    groups: dict[str, list[tuple[Sample, float]]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        groups.setdefault(sample.group_id, []).append((sample, reward))
    return list(groups.values())


def is_tied(group: Sequence[tuple[Sample, float]], needed: EstimatorNeeds | None = None) -> bool:
    """Return whether all rewards of a group agree; with `needed`, those of each source or turn that this estimator
    compares, too."""
    needed = needed or EstimatorNeeds()
    compared = {
        (
            reward,
            tuple(sorted(sample.rewards.items())) if needed.sources else (),
            tuple(sample.turn_rewards) if needed.turn_rewards else (),
        )
        for sample, reward in group
    }
    return len(compared) == 1


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """Facts that are known of the responses of a batch, an episode's branches as one, without their tokens."""

    lengths: Tensor
    """int64 `[B]`: tokens of each."""
    sampled: Tensor
    """int64 `[B]`: those that the policy sampled."""
    truncated: Tensor
    """bool `[B]`: cut by the length limit."""
    group_ids: Sequence[str]
    rewards: Sequence[Mapping[str, float]]
    """By label of a source, what it gave, without weight and shaping."""
    turn_rewards: Sequence[Sequence[float]]
    """What the environment gave each turn, without weight; empty where it gave nothing by turn."""
    turn_states: Sequence[Sequence[str]]
    """The key of the state before each turn; empty where nobody named them."""

    @classmethod
    def of(cls, batch: Batch) -> RowFacts:
        """Read those of a batch."""
        samples = batch.samples
        return cls(
            lengths=batch.lengths,
            sampled=batch.counts,
            truncated=batch.truncated,
            group_ids=[sample.group_id for sample in samples],
            rewards=[sample.rewards for sample in samples],
            turn_rewards=[sample.turn_rewards for sample in samples],
            turn_states=[sample.turn_states for sample in samples],
        )


class Experience:
    """Turns rewards into advantages, and remembers what must outlive a step: baseline, reward scale, KL and entropy weights."""

    def __init__(self, config: Config, parts: Sequence[StepPart] = ()) -> None:
        """`parts` are those that options take in a step."""
        self.config, algorithm, entropy = config, config.algorithm, config.algorithm.entropy
        self.parts = parts
        self.baseline = RunningMean()
        self.normaliser = RewardNormaliser()
        self.kl: AdaptiveKl | None = None
        if algorithm.kl.target is not None:
            self.kl = AdaptiveKl(algorithm.kl.coef, algorithm.kl.target, algorithm.kl.horizon)
        self.old_policy_kl = algorithm.old_policy_kl.coef
        """β of the penalty to the old policy, for the next step."""
        self.entropy_coef = entropy.coef
        """Weight of the entropy bonus in this step."""
        self.entropy: AdaptiveEntropy | None = None
        if entropy.target is not None:
            self.entropy = AdaptiveEntropy(entropy.coef, entropy.target, entropy.delta, entropy.max_coef)

    def row_inputs(
        self,
        known: RowFacts,
        rewards: Sequence[float],
        greedy: tuple[RowFacts, Sequence[float]] | None = None,
    ) -> RowInputs:
        """The driver's part of an estimate over a batch; the scale of rewards takes it in.

        Args:
            known: what is known of its rows.
            rewards: one per row, unshaped.
            greedy: greedy responses, one to every prompt, with their unshaped rewards, for an estimator that needs them.
        """
        algorithm = self.config.algorithm
        unshaped = torch.tensor(rewards, dtype=torch.float32)
        sampled = known.sampled
        if algorithm.truncated_responses == "exclude":
            sampled = torch.where(known.truncated, 0, sampled)
        return RowInputs(
            unshaped=unshaped,
            scores=self._shape(unshaped, known.lengths, sampled),
            greedy_scores=None if greedy is None else self._greedy_scores(*greedy, known),
            rewards_by_source=rewards_by_source(known.rewards),
            turn_rewards=self._weighted(known.turn_rewards),
            turn_states=state_numbers(known.turn_states),
            estimator=absolute_name(algorithm.advantage),
            needed=algorithm.estimator_needs,
            baseline=self.baseline,
            kl_coef=algorithm.kl.coef if self.kl is None else self.kl.coef,
            terms=tuple(filter(None, (part.advantage_term() for part in self.parts))),
            rewards_are_read=all(part.rewards_are_read for part in self.parts),
        )

    def take_outcome(self, rows: RowInputs, outcome: TokenOutcome) -> dict[str, float]:
        """Remember what an estimate over `rows`, all those of the batch, measured; returns metrics."""
        self.baseline = outcome.baseline
        metrics = outcome.metrics | {"reward/shaped_mean": float(rows.scores.mean())}
        if self.kl is not None and kl_is_in_reward(self.config):
            metrics["kl/coef"] = rows.kl_coef
            if outcome.kl is not None:
                self.kl.update(outcome.kl, outcome.kl_rows)
        return metrics

    def steer_old_policy_kl(self, kl: float | None) -> dict[str, float]:
        """Move β of the penalty to the old policy by the KL of a step's last update; returns what that step used, as a metric.

        `kl` is None where no update measured one.
        """
        target = self.config.algorithm.old_policy_kl.target
        if target is None or kl is None:
            return {}
        used, self.old_policy_kl = self.old_policy_kl, AdaptivePenalty(self.old_policy_kl, target).update(kl)
        return {"policy/kl_old_coef": used}

    def steer_entropy_by(self, entropy: float | None) -> dict[str, float]:
        """Set `entropy_coef` by the mean entropy of the tokens that are trained on, in nats, where it is steered; a metric.

        None: nothing measured it, and nothing is steered.
        """
        if self.entropy is None or entropy is None:
            return {}
        self.entropy_coef = self.entropy.update(entropy)
        return {"policy/entropy_coef": self.entropy_coef}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-able."""
        kl = self.kl.state_dict() if self.kl is not None else None
        return {
            "baseline": asdict(self.baseline),
            "normaliser": self.normaliser.state_dict(),
            "kl": kl,
            "old_policy_kl": self.old_policy_kl if self.config.algorithm.old_policy_kl.target is not None else None,
            "entropy": self.entropy.state_dict() if self.entropy is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`'s answer."""
        self.baseline = RunningMean(**state["baseline"])
        self.normaliser.load_state_dict(state["normaliser"])
        if self.config.algorithm.old_policy_kl.target is not None and state.get("old_policy_kl") is not None:
            self.old_policy_kl = state["old_policy_kl"]
        if self.kl is not None and state["kl"] is not None:
            self.kl.load_state_dict(state["kl"])
        if self.entropy is not None and state.get("entropy") is not None:
            self.entropy.load_state_dict(state["entropy"])

    def _shape(self, scores: Tensor, lengths: Tensor, sampled: Tensor, *, counted: bool = True) -> Tensor:
        """Penalties, then normalisation, then clipping (docs/methods.md#reward-shaping); all `[B]`.

        Of responses without sampled tokens, and of all unless `counted`, the running mean takes in nothing.
        """
        shaping = self.config.algorithm.shaping
        if shaping.overlong_tokens:
            scores = scores + overlong_penalty(lengths, self.config.rollout.max_new_tokens, shaping.overlong_tokens)
        if shaping.length_penalty:
            scores = scores + length_penalty(sampled, shaping.length_penalty)  # what a tool said costs nothing
        if shaping.normalise:
            scores = self.normaliser.normalise(scores, (sampled > 0) & counted)
        return scores if shaping.clip is None else clip_rewards(scores, -shaping.clip, shaping.clip)

    def _weighted(self, turn_rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Rewards that the environment gave each turn, with its weight; all else that a response got is its last turn's."""
        weights = self.config.reward_weights
        weight = sum(value for label, value in weights.items() if label.partition("#")[0] == EPISODE_REWARD)
        return [[weight * gained for gained in of_row] if weight else [] for of_row in turn_rewards]

    def _greedy_scores(self, greedy: RowFacts, rewards: Sequence[float], known: RowFacts) -> Tensor:
        """The reward of the greedy response to each row's prompt, float `[B]`, shaped as those of the rows were."""
        unshaped = torch.tensor(rewards, dtype=torch.float32)
        scores = self._shape(unshaped, greedy.lengths, greedy.sampled, counted=False).tolist()
        of_group = dict(zip(greedy.group_ids, scores, strict=True))
        return torch.tensor([of_group[group] for group in known.group_ids])


def rewards_by_source(rewards: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """By label of a source that judged all responses, what it gave them, float `[B]`, without weight and shaping."""
    labels = [label for label in rewards[0] if all(label in of_row for of_row in rewards)] if rewards else []
    return {label: torch.tensor([of_row[label] for of_row in rewards]) for label in labels}


def state_numbers(turn_states: Sequence[Sequence[str]]) -> list[list[int]]:
    """Numbers from 0 in place of the keys of states, equal for equal ones."""
    numbers: dict[str, int] = {}
    return [[numbers.setdefault(state, len(numbers)) for state in of_row] for of_row in turn_states]


def mini_batch_rows(batch: Batch, mini_batches: int, seed: int, of: Sequence[int] | None = None) -> list[list[int]]:
    """Rows of each mini-batch: whole groups in a seeded order, so that a group's prompt is computed once where it can be.

    Numbers of rows differ by one at most, as those of a step without some of its groups do.

    `of`: the rows that there are, two of each group, which stay together.
    """
    order = torch.randperm(int(batch.groups.max()) + 1, generator=torch.Generator().manual_seed(seed))
    rank = {int(group): position for position, group in enumerate(order)}
    rows = sorted(range(len(batch)) if of is None else of, key=lambda row: (rank[int(batch.groups[row])], row))
    unit = 1 if of is None else 2
    bounds = [len(rows) // unit * number // mini_batches * unit for number in range(mini_batches + 1)]
    return [rows[start:end] for start, end in pairwise(bounds) if end > start]


def loss_row_weights(sampled: Tensor, rows: Sequence[int], config: Config, aggregation: str | None = None) -> Tensor:
    """The weight of each sampled token of a response in one optimizer step over `rows`, float32 `[B]`; 0 for other rows.

    Args:
        sampled: int64 `[B]`, tokens in the mask of each row: of whole episodes, whose branches have one weight.
        rows: those of the optimizer step.
        config: the run's.
        aggregation: None: `algorithm.aggregation`.
    """
    norm_length = config.algorithm.norm_length or config.rollout.max_new_tokens
    counts = torch.zeros_like(sampled)
    counts[list(rows)] = sampled[list(rows)]
    return row_weights(counts, aggregation or config.algorithm.aggregation, norm_length=norm_length)


def set_loss_weights(batch: Batch, rows: Sequence[int], config: Config, aggregation: str | None = None) -> None:
    """Column `weights`: the global denominators of one optimizer step over `rows` (docs/methods.md#aggregation).

    `aggregation`: None: `algorithm.aggregation`.
    """
    lay_loss_weights(batch, loss_row_weights(batch.counts, rows, config, aggregation))


def lay_loss_weights(batch: Batch, of_rows: Tensor) -> None:
    """Column `weights`: `of_rows` float32 `[b]` at the tokens in the mask of each of these rows, some of a batch or all."""
    batch.set_rows("weights", of_rows)
