"""Questions of the driver to a role's model on each rank; it asks them without importing megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.options.routing_replay.column import RecordedRoutes, ReplayCounts

if TYPE_CHECKING:
    from megarl.megatron.rank_model import RankModel
    from megarl.options.routing_replay.model_part import RoutingReplay


def recorded_routes(model: RankModel) -> RecordedRoutes | None:
    """The routes of the last pass on the first tensor and context rank of each stage; collective over the stage's ranks."""
    return replay.recorded() if (replay := _replay_of(model)) is not None else None


def replay_counts(model: RankModel) -> ReplayCounts:
    """The choices that this rank replayed since the last call."""
    return replay.take_counts() if (replay := _replay_of(model)) is not None else ReplayCounts()


def _replay_of(model: RankModel) -> RoutingReplay | None:
    from megarl.options.routing_replay.model_part import RoutingReplay

    return next((part for part in model.parts if isinstance(part, RoutingReplay)), None)
