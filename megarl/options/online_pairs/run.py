"""Online pairs in a run: a loss of pairs learns from the best and the worst response of every group."""

from __future__ import annotations

from typing import Any

from megarl.algorithms import PreferenceSettings
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.experience.step_parts import ChosenRows, StepPart
from megarl.options.online_pairs.loss import PairLoss
from megarl.options.online_pairs.pairs import choose_pairs
from megarl.system.user_code import absolute_name


class OnlinePairs(StepPart):
    """The part of a loss that compares two responses."""

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        self._loss = PairLoss(absolute_name(algorithm.policy_loss), PreferenceSettings(**algorithm.policy_loss_args))

    def choose_rows(self, batch: Batch) -> ChosenRows:
        """Two responses of every group that has two."""
        return choose_pairs(batch)

    def stream_loss(self) -> PairLoss:
        """The preference loss of the config."""
        return self._loss


def take_part(config: Config, tokenizer: Any) -> OnlinePairs | None:
    """The pairs of a run whose loss is one of pairs."""
    return OnlinePairs(config) if config.algorithm.loss_needs.pairs else None
