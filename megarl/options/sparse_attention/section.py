"""The section `policy.indexer`. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Section


class IndexerConfig(Section):
    """The indexers that choose the keys of each query, in a model that has some (docs/sparse_attention.md)."""

    train: Literal["none", "dense", "sparse"] = "none"
    """`none`: indexers stay as they are. Else they learn what attention does: over all keys before a query (`dense`, a
    warm-up), or over the chosen ones (`sparse`)."""
    loss_coeff: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the indexers' loss, the mean over tokens of its divergence from attention, in each layer. It scales indexers'
    own gradients only."""
    replay: Literal["none", "engine"] = "none"
    """`none`: indexers choose anew in every pass. `engine`: the policy attends to the keys that the engine that sampled the
    response chose."""


INDEXER = AddedField(
    "PolicyConfig",
    "indexer",
    IndexerConfig,
    IndexerConfig(),
    "Indexers (sparse attention): their training, and replay of choices.",
)
FIELDS = (INDEXER,)
indexer_of = INDEXER.of
"""The section `policy.indexer`."""
