"""From rewards and log-probs to advantages, returns and loss weights: docs/methods.md on the driver, over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    AdaptiveEntropy,
    AdaptiveKl,
    AdaptivePenalty,
    AdvantageInputs,
    AdvantageOutputs,
    Correction,
    RewardNormaliser,
    RunningMean,
    clip_rewards,
    correction,
    kl_per_token,
    last_of_each_row,
    length_penalty,
    normalised,
    overlong_penalty,
    rewards_of_turns,
    token_weights,
    turn_numbers,
)
from megarl.algorithms.catalogue import ESTIMATORS, EstimatorNeeds
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.data.sample import EPISODE_REWARD, Sample
from megarl.errors import ConfigError, MegarlError
from megarl.experience.step_parts import StepPart
from megarl.system.user_code import describe

COLUMNS_READ = {
    "old_log_probs": "old_log_probs",
    "entropy": "old_entropy",
    "collision": "old_collision",
    "reference_log_probs": "reference_log_probs",
    "teacher_log_probs": "teacher_log_probs",
}
"""Needs of an estimator, and the column of the batch that it is given for each."""


@dataclass(frozen=True)
class RewardStatistics:
    """Statistics of a step's rewards: mean, standard deviation, and the share of groups whose rewards all agree."""

    mean: float
    std: float
    uniform_groups: float


def reward_statistics(scores: Tensor, groups: Tensor) -> RewardStatistics:
    """`scores` float `[B]`, `groups` int64 `[B]`."""
    spreads = [scores[groups == group].max() - scores[groups == group].min() for group in groups.unique()]
    tied = sum(float(spread == 0) for spread in spreads) / max(len(spreads), 1)
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

    def estimate(
        self, batch: Batch, rewards: Sequence[float], greedy: Sequence[tuple[Sample, float]] | None = None
    ) -> dict[str, float]:
        """Add the columns `advantages`, for a critic `returns` and with a correction `correction` to `batch`; returns metrics.

        A response that is alone in its group under a group estimator, that was rejected by the correction, or that was
        truncated where `truncated_responses` is 'mask', leaves the mask, and so every denominator; where it is 'exclude', every
        baseline and running mean too. Tokens that the column `older` names leave the mask once the advantages are there.

        Args:
            batch: with `old_log_probs` where they are needed, `reference_log_probs` where KL is in the reward, `values`
                and `values_after` for a critic, `step_rewards` and `step_ends` for process rewards.
            rewards: one per row, unshaped.
            greedy: greedy responses, one to every prompt, with their unshaped rewards, for an estimator that needs them.
        """
        algorithm, needed = self.config.algorithm, self.config.algorithm.estimator_needs
        metrics: dict[str, float] = {}
        turns = turn_numbers(batch.mask)
        if algorithm.truncated_responses == "exclude":
            batch.mask[batch.truncated] = False
        unshaped = torch.tensor(rewards, dtype=torch.float32)
        scores = self._shape(unshaped, batch)
        if "step_rewards" in batch.columns:  # what shaping took off or added stands at the last step
            last = last_of_each_row(batch.columns["step_ends"].bool() & batch.mask)
            batch.columns["step_rewards"] += torch.where(last, (scores - unshaped)[:, None], 0)
        if algorithm.rollout_correction and not algorithm.bypasses_old_log_probs:
            metrics |= self._correct(batch)
        read = {name: batch.columns[column] for name, column in COLUMNS_READ.items() if getattr(needed, name)}
        outputs = self._estimated(
            needed,
            AdvantageInputs(
                scores=scores,
                token_penalty=self._kl_penalty(batch, metrics),
                mask=batch.mask,
                groups=batch.groups,
                values=batch.columns.get("values"),
                truncated=batch.truncated,
                gamma=algorithm.gamma,
                lam=algorithm.gae_lambda,
                eps=algorithm.advantage_eps,
                unbiased=algorithm.unbiased_std,
                normalisation=algorithm.advantage_normalisation,
                bootstrap_truncated=algorithm.truncated_responses == "bootstrap",
                bootstrap_values=batch.columns["values_after"].sum(1) if "values_after" in batch.columns else None,
                baseline=self.baseline,
                greedy_scores=self._greedy_scores(greedy, batch),
                step_rewards=batch.columns.get("step_rewards"),
                step_ends=batch.columns["step_ends"].bool() if "step_ends" in batch.columns else None,
                rewards_by_source=rewards_by_source(batch.samples),
                reward_weights=self.config.reward_weights,
                turns=turns,
                turn_rewards=self._turn_rewards(scores, turns, batch),
                states=state_numbers(batch.samples, turns),
                rollout_log_probs=batch.columns["rollout_log_probs"],
                **read,
            ),
        )
        advantages = outputs.advantages
        for part in self.parts:
            advantages = part.shape_advantages(advantages, lambda: self._sampled_log_probs(batch), batch)
        batch.columns["advantages"] = advantages
        if outputs.returns is not None:
            batch.columns["returns"] = outputs.returns
            metrics |= _explained(outputs.returns, batch)
        self.baseline = outputs.baseline or self.baseline
        if outputs.dropped is not None:
            batch.mask[outputs.dropped] = False
            metrics["reward/lone_responses"] = float(outputs.dropped.sum())
        if algorithm.truncated_responses == "mask":
            batch.mask[batch.truncated] = False
        if "older" in batch.columns:
            batch.mask = batch.mask & (batch.columns["older"] == 0)
        return metrics | {"reward/shaped_mean": float(scores.mean())}

    def _estimated(self, needed: EstimatorNeeds, inputs: AdvantageInputs) -> AdvantageOutputs:
        """The estimator's answer; zeros where rewards are only logged."""
        algorithm = self.config.algorithm
        if not all(part.rewards_are_read for part in self.parts):
            return AdvantageOutputs(advantages=torch.zeros(inputs.mask.shape))
        return estimated(algorithm.advantage, needed, inputs, algorithm.advantage_args)

    def _sampled_log_probs(self, batch: Batch) -> Tensor:
        """The policy's at the start of the step; the engine's where no pass computes them (`bypass`)."""
        return batch.columns["rollout_log_probs" if self.config.algorithm.bypasses_old_log_probs else "old_log_probs"]

    def steer_old_policy_kl(self, kl: float | None) -> dict[str, float]:
        """Move β of the penalty to the old policy by the KL of a step's last update; returns what that step used, as a metric.

        `kl` is None where no update measured one.
        """
        target = self.config.algorithm.old_policy_kl.target
        if target is None or kl is None:
            return {}
        used, self.old_policy_kl = self.old_policy_kl, AdaptivePenalty(self.old_policy_kl, target).update(kl)
        return {"policy/kl_old_coef": used}

    def steer_entropy(self, batch: Batch) -> dict[str, float]:
        """Set `entropy_coef` by the mean entropy of the tokens that `batch` trains on, where it is steered; a metric.

        `batch` has `old_entropy`. Without a token in the mask nothing is steered.
        """
        if self.entropy is None or not batch.mask.any():
            return {}
        self.entropy_coef = self.entropy.update(float(batch.columns["old_entropy"][batch.mask].double().mean()))
        return {"policy/entropy_coef": self.entropy_coef}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-able."""
        kl = self.kl.state_dict() if self.kl is not None else None
        return {
            "baseline": asdict(self.baseline),
            "normaliser": self.normaliser.state_dict(),
            "kl": kl,
            "old_policy_kl": self.old_policy_kl,
            "entropy": self.entropy.state_dict() if self.entropy is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`'s answer."""
        self.baseline = RunningMean(**state["baseline"])
        self.normaliser.load_state_dict(state["normaliser"])
        if self.config.algorithm.old_policy_kl.target is not None:
            self.old_policy_kl = state.get("old_policy_kl", self.old_policy_kl)
        if self.kl is not None and state["kl"] is not None:
            self.kl.load_state_dict(state["kl"])
        if self.entropy is not None and state.get("entropy") is not None:
            self.entropy.load_state_dict(state["entropy"])

    def _shape(self, scores: Tensor, batch: Batch, *, counted: bool = True) -> Tensor:
        """Penalties, then normalisation, then clipping (docs/methods.md#reward-shaping).

        Of responses without sampled tokens, and of all unless `counted`, the running mean takes in nothing.
        """
        shaping = self.config.algorithm.shaping
        if shaping.overlong_tokens:
            scores = scores + overlong_penalty(batch.lengths, self.config.rollout.max_new_tokens, shaping.overlong_tokens)
        if shaping.length_penalty:
            scores = scores + length_penalty(batch.mask.sum(1), shaping.length_penalty)  # what a tool said costs nothing
        if shaping.normalise:
            scores = self.normaliser.normalise(scores, batch.mask.any(1) & counted)
        return scores if shaping.clip is None else clip_rewards(scores, -shaping.clip, shaping.clip)

    def _turn_rewards(self, scores: Tensor, turns: Tensor, batch: Batch) -> Tensor:
        """The reward that each turn was given, at its last token `[B, T]`: by the environment, with its weight; all else
        is the last's."""
        weights = self.config.reward_weights
        weight = sum(value for label, value in weights.items() if label.partition("#")[0] == EPISODE_REWARD)
        weighted = [[weight * gained for gained in sample.turn_rewards] if weight else [] for sample in batch.samples]
        return rewards_of_turns(scores, turns, weighted)

    def _greedy_scores(self, greedy: Sequence[tuple[Sample, float]] | None, batch: Batch) -> Tensor | None:
        """The reward of the greedy response to each row's prompt, float `[B]`, shaped as those of the rows were."""
        if greedy is None:
            return None
        rewards = torch.tensor([reward for _, reward in greedy], dtype=torch.float32)
        scores = self._shape(rewards, Batch([sample for sample, _ in greedy]), counted=False).tolist()
        of_group = {sample.group_id: score for (sample, _), score in zip(greedy, scores, strict=True)}
        return torch.tensor([of_group[sample.group_id] for sample in batch.samples])

    def _correct(self, batch: Batch) -> dict[str, float]:
        columns = batch.columns
        settings = [Correction(**setting.model_dump()) for setting in self.config.algorithm.rollout_correction]
        weights, kept, statistics = correction(columns["old_log_probs"], columns["rollout_log_probs"], batch.mask, settings)
        columns["correction"] = weights
        batch.mask = kept
        return {f"correction/{name}": value for name, value in statistics.items()}

    def _kl_penalty(self, batch: Batch, metrics: dict[str, float]) -> Tensor:
        """−β·KL of every token where KL belongs to the reward, else zeros; moves an adaptive β afterwards."""
        settings = self.config.algorithm.kl
        if not settings.coef or settings.apply_to != "reward":
            return torch.zeros(batch.mask.shape)
        kl = kl_per_token(self._sampled_log_probs(batch), batch.columns["reference_log_probs"], settings.estimator) * batch.mask
        coef = settings.coef if self.kl is None else self.kl.coef
        if self.kl is not None:
            nonempty = batch.mask.any(1)
            if nonempty.any():
                self.kl.update(float(kl.sum(1)[nonempty].mean()), int(nonempty.sum()))
            metrics["kl/coef"] = coef
        return -coef * kl


def rewards_by_source(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """By label of a source that judged all `samples`, what it gave them, float `[B]`, without weight and shaping."""
    labels = [label for label in samples[0].rewards if all(label in sample.rewards for sample in samples)] if samples else []
    return {label: torch.tensor([sample.rewards[label] for sample in samples]) for label in labels}


def state_numbers(samples: Sequence[Sample], turns: Tensor) -> Tensor:
    """Number of the state before the turn of each sampled token, int64 `[B, T]` as `turns`; −1 where none is named."""
    numbers: dict[str, int] = {}
    states = torch.full(turns.shape, -1)
    for row, sample in enumerate(samples):
        if sample.turn_states:
            of_turns = torch.tensor([numbers.setdefault(state, len(numbers)) for state in sample.turn_states])
            states[row] = torch.where(turns[row] >= 0, of_turns[turns[row].clamp(min=0)], -1)
    return states


def estimated(
    name: str, needed: EstimatorNeeds, inputs: AdvantageInputs, arguments: Mapping[str, Any] | None = None
) -> AdvantageOutputs:
    """Call the estimator `name` and give its answer to `inputs` and `arguments` of the config.

    A user's own may be wrong in ways that nothing later would name.

    Raises:
        ConfigError: it raised, or answered something else than advantages and, with a critic, returns for every token.
    """
    arguments = arguments or {}
    estimator: Callable[..., AdvantageOutputs] = ADVANTAGES.resolve(name, arguments)
    try:
        outputs = estimator(inputs, **arguments)
    except Exception as error:
        if name in ESTIMATORS or isinstance(error, MegarlError):
            raise
        raise ConfigError(f"algorithm.advantage: '{name}' raised {describe(error)}") from error
    if not isinstance(outputs, AdvantageOutputs):
        raise ConfigError(f"algorithm.advantage: '{name}' must return AdvantageOutputs, but returned {type(outputs).__name__}")
    shape = inputs.mask.shape
    required = ("advantages", "returns") if needed.values else ("advantages",)
    for field, expected_shape in {"advantages": shape, "returns": shape, "dropped": shape[:1]}.items():
        value = getattr(outputs, field)
        if value is None and field not in required:
            continue
        if not isinstance(value, Tensor) or value.shape != expected_shape:
            actual = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            why = ", as the critic is trained on them" if field == "returns" else ""
            raise ConfigError(
                f"algorithm.advantage: '{name}' must return {field} as a tensor of shape {list(expected_shape)}{why}, "
                f"but gave {actual}"
            )
    return outputs if name in ESTIMATORS else normalised(outputs, inputs, needed)


def mini_batch_rows(batch: Batch, mini_batches: int, seed: int, of: Sequence[int] | None = None) -> list[list[int]]:
    """Rows of each mini-batch: whole groups in a seeded order, so that a group's prompt is computed once where it can be.

    `of`: the rows that there are, two of each group, which stay together.
    """
    order = torch.randperm(int(batch.groups.max()) + 1, generator=torch.Generator().manual_seed(seed))
    rank = {int(group): position for position, group in enumerate(order)}
    rows = sorted(range(len(batch)) if of is None else of, key=lambda row: (rank[int(batch.groups[row])], row))
    size = len(rows) // mini_batches if of is None else 2 * -(-len(rows) // (2 * mini_batches))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def set_loss_weights(batch: Batch, rows: Sequence[int], config: Config, aggregation: str | None = None) -> None:
    """Column `weights`: the global denominators of one optimizer step over `rows` (docs/methods.md#aggregation).

    `aggregation`: None: `algorithm.aggregation`.
    """
    norm_length = config.algorithm.norm_length or config.rollout.max_new_tokens
    mask = torch.zeros_like(batch.mask)
    mask[list(rows)] = batch.mask[list(rows)]
    batch.columns["weights"] = token_weights(mask, aggregation or config.algorithm.aggregation, norm_length=norm_length)


def _explained(returns: Tensor, batch: Batch) -> dict[str, float]:
    """`critic/explained_variance`: 1 - Var(returns - values) / Var(returns) over the sampled tokens; none of equal returns."""
    if "values" not in batch.columns:
        return {}
    targets, errors = returns[batch.mask].double(), (returns - batch.columns["values"])[batch.mask].double()
    spread = float(targets.var(correction=0)) if targets.numel() else 0.0
    return {"critic/explained_variance": 1 - float(errors.var(correction=0)) / spread} if spread > 0 else {}
