"""Answers of a server to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.options.serve.section import serve_of


def needs_all_places(config: Config) -> bool:
    """Return whether what has no place at a start never gets one: only a run's steps look for it."""
    return serve_of(config) is not None


def needs_no_reward(config: Config) -> bool:
    """Return whether clients judge what they sample themselves."""
    return serve_of(config) is not None
