"""Advantages of a teacher: each token by its reverse KL, beside or in place of those of rewards."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.data.batch import Batch
from megarl.experience.experience import Experience
from megarl.options.distillation.run import Teachers
from tests.experience.estimates import estimate
from tests.experience.test_experience import LENGTHS, REWARDS, batch, config, of_row


def distilled(*overrides: str) -> Batch:
    """With a teacher that is a tenth of a nat per place away from the policy."""
    made = batch()
    away = 0.1 * torch.arange(made.mask.shape[1]).float()
    made.columns["teacher_log_probs"] = (made.columns["old_log_probs"] - away) * made.mask
    settings = config("teacher.path=wise", "algorithm.kl.coef=0.0", *overrides)
    estimate(Experience(settings, [Teachers(settings)]), made, REWARDS)
    return made


def test_a_teacher_alone_gives_advantages_without_the_reward() -> None:
    made = distilled("algorithm.name=opd", "algorithm.distillation.coef=2.0")
    for row, length in enumerate(LENGTHS):
        assert of_row(made, row) == pytest.approx([-0.2 * place for place in range(length)], abs=1e-5)


def test_a_teacher_is_added_to_normalised_advantages_by_its_weight_and_to_go() -> None:
    made = distilled("algorithm.name=grpo", "algorithm.distillation={coef: 2.0, reward_coef: 3.0, gamma: 0.5}")
    for row, length in enumerate(LENGTHS):
        of_reward = 3.0 * (0.5 if row % 2 == 0 else -0.5) / (math.sqrt(0.5) + 1e-6)
        to_go = [sum(0.5 ** (later - place) * 0.1 * later for later in range(place, length)) for place in range(length)]
        assert of_row(made, row) == pytest.approx([of_reward - 2.0 * value for value in to_go], abs=1e-5)


def test_a_policy_that_sampled_elsewhere_is_compared_as_it_is_at_the_start_of_the_step_unless_nobody_computes_that() -> None:
    """The engine's log-probs are off by 0, −1, 1 and −0.1 nats."""
    stale = distilled("algorithm.name=opd", "algorithm.rollout_correction.mode=bypass")
    for row, gap in enumerate([0.0, -1.0, 1.0, -0.1]):
        wanted = [-(gap + 0.1 * place) for place in range(LENGTHS[row])]
        assert of_row(stale, row) == pytest.approx(wanted, abs=1e-5)
