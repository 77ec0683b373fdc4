"""Answers of engines that come and go to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.rollout import RolloutConfig
from megarl.config.schema import Config
from megarl.options.elastic_engines.section import max_engines_of


def further_engines(rollout: RolloutConfig) -> int | None:
    """Number of engines that may come beside `rollout.engines`; None: their number is fixed."""
    most = max_engines_of(rollout)
    return None if most is None else most - rollout.engines


def without_training(config: Config) -> Config:
    """The config of a run in which nothing trains: it is short, and its engines stay."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_engines": None})})
