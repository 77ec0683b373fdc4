"""Answers of elastic to questions that are asked of every config."""

from __future__ import annotations

from megarl.config import AnyConfig
from megarl.options.elastic.section import spares_of


def spare_places(config: AnyConfig) -> int | None:
    """Number of places beside the run's own at which processes wait for lost ranks; None: lost ranks are not replaced."""
    return spares_of(config.resources)
