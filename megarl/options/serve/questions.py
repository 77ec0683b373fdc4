"""Answers of a server to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.options.serve.section import serve_of


def needs_no_reward(config: Config) -> bool:
    """Return whether clients judge what they sample themselves."""
    return serve_of(config) is not None
