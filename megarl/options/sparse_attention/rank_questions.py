"""A question of the driver to a role's model on each rank; it asks it without importing megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.megatron.rank_model import RankModel


def taken_losses(model: RankModel) -> tuple[dict[int, float], int]:
    """The losses of this rank's indexers by layer, each its part of a batch's mean, summed over so many passes since the last
    call; none on ranks whose losses another one tells."""
    from megarl.options.sparse_attention.model_part import IndexerTraining

    part = next((part for part in model.parts if isinstance(part, IndexerTraining)), None)
    return part.take_losses() if part is not None else ({}, 0)
