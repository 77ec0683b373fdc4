"""The rewards that megarl has, by name, and the sources that a config names: built in, or functions of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config.secrets import without_secrets
from megarl.config.sections import DataConfig, RewardConfig, reward_labels
from megarl.errors import RewardError, nearest
from megarl.rewards.builtin.boxes import Boxes
from megarl.rewards.builtin.code_tests import CodeTests
from megarl.rewards.builtin.edit_distance import EditDistance
from megarl.rewards.builtin.environment import EnvironmentReward
from megarl.rewards.builtin.exact_number import ExactNumber
from megarl.rewards.builtin.exact_text import ExactText
from megarl.rewards.builtin.format_regex import FormatRegex
from megarl.rewards.builtin.fuzzy_text import FuzzyText
from megarl.rewards.builtin.http import HttpReward
from megarl.rewards.builtin.json_object import JsonObject
from megarl.rewards.builtin.llm_judge import LlmJudge
from megarl.rewards.builtin.math_verify import MathVerify
from megarl.rewards.builtin.multiple_choice import MultipleChoice
from megarl.rewards.builtin.reasoning_gym import ReasoningGymTask
from megarl.rewards.foreign_forms import RowKeys
from megarl.rewards.scorer import Scorer
from megarl.rewards.sources import SCORED_S, RewardSources
from megarl.rewards.user_reward import UserReward
from megarl.system.user_code import FORMS

BUILT_IN: dict[str, type[Any]] = {
    "math_verify": MathVerify,
    "exact_number": ExactNumber,
    "reasoning_gym": ReasoningGymTask,
    "multiple_choice": MultipleChoice,
    "exact_text": ExactText,
    "fuzzy_text": FuzzyText,
    "edit_distance": EditDistance,
    "boxes": Boxes,
    "json_object": JsonObject,
    "format_regex": FormatRegex,
    "code_tests": CodeTests,
    "http": HttpReward,
    "llm_judge": LlmJudge,
    "environment": EnvironmentReward,
}
"""Each is made with the key of the gold answer in a row, `ReasoningGymTask` with the sources of rows instead."""


def build_rewards(configs: Sequence[RewardConfig], data: DataConfig, deadline_s: float = SCORED_S) -> RewardSources:
    """The sources that `configs` name, which have `deadline_s` for the samples of a step.

    Raises:
        RewardError: a name is neither built in nor a function that can be imported, or it does not take its arguments.
    """
    labels = reward_labels([config.name for config in configs])
    built = [(label, config.weight, _scorer(config, data)) for label, config in zip(labels, configs, strict=True)]
    return RewardSources(built, deadline_s)


def _scorer(config: RewardConfig, data: DataConfig) -> Scorer:
    scorer = _named(config, data)
    scorer.judges_apart = scorer.judges_apart if config.ahead is None else config.ahead
    return scorer


def _named(config: RewardConfig, data: DataConfig) -> Scorer:
    if config.name in BUILT_IN:
        scorer = BUILT_IN[config.name]
        sources = {"train": data.train} | ({"eval": data.eval} if data.eval is not None else {})
        read = sources if scorer is ReasoningGymTask else data.answer_key
        try:
            return scorer(read, **config.args)
        except TypeError as error:
            raise RewardError(
                f"reward '{config.name}' does not take the arguments {without_secrets(config.args)}: {error}"
            ) from None
    if ":" not in config.name:
        raise RewardError(
            f"there is no reward '{config.name}'{nearest(config.name, BUILT_IN)}; it must be {', '.join(BUILT_IN)}, {FORMS}"
        )
    return UserReward(config.name, config.args, RowKeys(data.prompt_key, data.answer_key))
