"""Answers of disaggregation to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.options.disaggregation.section import disaggregation_of


def needs_all_places(config: Config) -> bool:
    """Return whether a run cannot do with fewer engines: the first ones prefill, the last ones decode."""
    return disaggregation_of(config.rollout) is not None


def without_training(config: Config) -> Config:
    """The config of a run in which nothing trains: it is short, and each of its engines prefills and decodes."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"disaggregation": None})})
