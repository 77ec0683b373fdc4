"""The class of engines that are disaggregated."""

from __future__ import annotations

from megarl.config.rollout import RolloutConfig
from megarl.options.disaggregation.section import disaggregation_of


def engine_path(rollout: RolloutConfig) -> str | None:
    """The import path of the engines' class; None: engines of this run prefill and decode."""
    is_parted = disaggregation_of(rollout) is not None
    return "megarl.options.disaggregation.engine:DisaggregatedEngine" if is_parted else None
