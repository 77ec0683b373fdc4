"""A reward model in a run: it scores every response, or every step of one, which is part of the sample's reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import aggregate_steps, last_of_each_row
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.errors import RewardError
from megarl.experience.step_parts import StepPart
from megarl.options.reward_model.section import RewardModelConfig, reward_model_of
from megarl.runs.training_side import TrainingSide

REWARD_MODEL = "reward_model"
"""The name of its role."""


class ModelRewards(StepPart):
    """Asks the role `reward_model`. A process model's scores are logits; a step's reward is their sigmoid."""

    def __init__(self, config: RewardModelConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._ends_step: dict[int, bool] = {}
        self._steps: dict[str, tuple[Tensor, Tensor]] = {}

    def score(self, roles: TrainingSide, samples: Sequence[Sample]) -> list[float]:
        """Weighted score of every response (of a process model that of its steps), also left in `sample.rewards`."""
        batch, weight = Batch(samples), self.config.weight
        at = self._step_ends(batch) if self.config.per_step else batch.last_tokens
        roles.forward(REWARD_MODEL, batch, ["score"], at=at)
        scores = batch.columns["score"]
        if self.config.per_step:
            scores = torch.where(at, scores.sigmoid(), 0)
            self._steps = {s.sample_id: (scores[row], at[row]) for row, s in enumerate(samples)} | self._steps
            totals = aggregate_steps(scores, at, self.config.step_aggregation)
        else:
            totals = scores.sum(1)
        for sample, total in zip(samples, totals.tolist(), strict=True):
            if not math.isfinite(total):
                raise RewardError(f"reward_model gave {total} to sample {sample.sample_id}; it must be a finite number")
            sample.rewards["reward_model"] = total
        return (weight * totals).tolist()

    def take_rewards(self, batch: Batch, rewards: Sequence[float]) -> None:
        """Add `step_rewards` and `step_ends`: each step's weighted reward, and at the last what the other sources gave.

        Only tokens that the policy sampled end steps. A model that scores whole responses adds nothing.
        """
        if not self.config.per_step:
            return
        if missing := sum(sample.sample_id not in self._steps for sample in batch.samples):
            raise RewardError(
                f"reward_model.per_step needs the model's rewards of every step, but {missing} of {len(batch)} samples were "
                "not judged since the last advantages; judge them with session.reward before it"
            )
        step_rewards, step_ends = torch.zeros(batch.mask.shape), torch.zeros(batch.mask.shape)
        for row, sample in enumerate(batch.samples):
            scores, ends = (column[: len(sample.response_ids)] for column in self._steps[sample.sample_id])
            step_rewards[row, : len(scores)] = self.config.weight * scores
            step_ends[row, : len(ends)] = ends.float()
            if ends.any():
                step_rewards[row, ends.nonzero()[-1]] += rewards[row] - self.config.weight * sample.rewards["reward_model"]
        batch.columns.update(step_rewards=step_rewards, step_ends=step_ends)
        self._steps = {}

    def _step_ends(self, batch: Batch) -> Tensor:
        """bool `[B, T]`: sampled tokens whose text has a line break, and the last sampled token of every response."""
        ends = last_of_each_row(batch.mask)
        for row, sample in enumerate(batch.samples):
            for position, (token, is_sampled) in enumerate(zip(sample.response_ids, sample.sampled_mask, strict=True)):
                if not is_sampled:
                    continue
                if token not in self._ends_step:
                    self._ends_step[token] = "\n" in self.tokenizer.decode([token])
                if self._ends_step[token]:
                    ends[row, position] = True
        return ends


def take_part(config: Config, tokenizer: Any) -> ModelRewards | None:
    """The scores of the reward model, if there is one."""
    settings = reward_model_of(config)
    return ModelRewards(settings, tokenizer) if settings.path is not None else None
