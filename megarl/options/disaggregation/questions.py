"""Answers of disaggregation to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.schema import Config


def without_training(config: Config) -> Config:
    """The config of a run in which nothing trains: it is short, and each of its engines prefills and decodes."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"disaggregation": None})})
