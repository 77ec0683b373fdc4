"""Questions of the driver to a role's model on each rank; it asks them without importing megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megarl.megatron.rank_model import RankModel


def taken_losses(model: RankModel) -> tuple[dict[int, float], int]:
    """The losses of this rank's indexers by layer, each its part of a batch's mean, summed over so many passes since the last
    call; none on ranks whose losses another one tells."""
    from megarl.options.sparse_attention.model_part import IndexerTraining

    part = next((part for part in model.parts if isinstance(part, IndexerTraining)), None)
    return part.take_losses() if part is not None else ({}, 0)


class ChoiceCounts(NamedTuple):
    """Queries in layers with an indexer that see more keys than they may choose, those of them whose choice was known, the keys
    of these, and the keys among these that the indexer would not choose now."""

    queries: int = 0
    known: int = 0
    keys: int = 0
    differing: int = 0


def taken_replays(model: RankModel) -> ChoiceCounts:
    """The counts of this rank's indexers since the last call."""
    import torch

    from megarl.options.sparse_attention.attention import IndexedAttention

    modules = (module for chunk in model.chunks for module in chunk.modules())
    layers = [module for module in modules if isinstance(module, IndexedAttention)]
    counts = [counts for layer in layers for counts in layer.told_counts]
    for layer in layers:
        layer.told_counts.clear()
    return ChoiceCounts(*torch.stack(counts).sum(0).tolist()) if counts else ChoiceCounts()
