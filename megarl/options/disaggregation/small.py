"""Disaggregated engines of a run that is made small, for a rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.options.disaggregation.section import disaggregation_of


def shrink(config: Config, tree: dict[str, Any], model: Path, *, vocabulary: int) -> None:
    """Give the small run's `tree` as many engines of both kinds."""
    disaggregation = disaggregation_of(config.rollout)
    if disaggregation is not None:
        tree["rollout"]["disaggregation"] = disaggregation.model_dump(mode="json")
