"""Properties of LongCat-Flash's layers that no others have."""

from __future__ import annotations

from dataclasses import dataclass

OPTION = "shortcut_experts"
SECOND, DENSE = "second.", "dense_mlp."
"""Modules of a layer: its second half, which is a layer of attention and an MLP, and the MLP of its first."""


@dataclass(frozen=True)
class ShortcutLayers:
    """All layers. Their routers choose among so many `zero_experts`, too, each of which gives a token as it is.

    The normed latent of queries is multiplied by `query_scale`, that of keys and values by `key_value_scale`.
    """

    zero_experts: int
    query_scale: float
    key_value_scale: float
    option: str = OPTION
    keyless: frozenset[int] = frozenset()
