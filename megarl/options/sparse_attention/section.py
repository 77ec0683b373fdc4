"""The section `policy.indexer`. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Section


class IndexerConfig(Section):
    """Training of the indexers that choose the keys of each query, in a model that has some (docs/sparse_attention.md)."""

    train: Literal["none", "dense", "sparse"] = "none"
    """`none`: indexers stay as they are. Else they learn what attention does: over all keys before a query (`dense`, a
    warm-up), or over the chosen ones (`sparse`)."""
    loss_coeff: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the indexers' loss, the mean over tokens of its divergence from attention, in each layer. It scales indexers'
    own gradients only."""


INDEXER = AddedField("PolicyConfig", "indexer", IndexerConfig, IndexerConfig(), "Training of indexers (sparse attention).")
FIELDS = (INDEXER,)
indexer_of = INDEXER.of
"""The section `policy.indexer`."""
