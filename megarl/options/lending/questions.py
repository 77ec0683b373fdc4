"""Answers of lending to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.rollout import ScheduleConfig
from megarl.config.schema import Config
from megarl.options.lending.section import lent_engines_of


def lent_engines(schedule: ScheduleConfig) -> int:
    """Number of engines that share GPUs with the trainer."""
    return lent_engines_of(schedule)


def needs_all_places(config: Config) -> bool:
    """Return whether engines are lent GPUs, which might be none of the run's with fewer replicas."""
    return lent_engines(config.rollout.schedule) > 0


def without_training(config: Config) -> Config:
    """The config of a run in which nothing trains that could lend GPUs."""
    return with_lent(config, 0)


def with_lent(config: Config, count: int) -> Config:
    """The config with this number of lent engines, unchecked."""
    schedule = config.rollout.schedule.model_copy(update={"lent_engines": count})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"schedule": schedule})})
