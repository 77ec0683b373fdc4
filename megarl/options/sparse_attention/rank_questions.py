"""A question of the driver to a role's model on each rank; it asks it without importing megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megarl.megatron.rank_model import RankModel


class TakenLosses(NamedTuple):
    """The losses of indexers by layer, summed over so many `passes` with gradients: each is a rank's part of a batch's mean."""

    by_layer: dict[int, float]
    passes: int


def taken_losses(model: RankModel) -> TakenLosses:
    """This rank's losses since the last call; none on ranks whose losses another one tells."""
    from megarl.options.sparse_attention.model_part import IndexerTraining

    part = next((part for part in model.parts if isinstance(part, IndexerTraining)), None)
    return part.take_losses() if part is not None else TakenLosses({}, 0)
