"""Changes that some families make to queries and attention scores, around the core attention of a layer spec."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from megarl.models.architecture import QueryScale


def with_score_traits(core: type, scale: QueryScale | None, cap: float | None) -> type:
    """The core attention `core`, with queries scaled by their positions and scores capped; None: as it is.

    `cap` is for the reference attention alone.
    """
    core = core if cap is None else capping_scores(core, cap)
    return core if scale is None else scaling_queries(core, scale)


@cache
def capping_scores(core: type, cap: float) -> type:
    """The reference attention `core` with scores below `cap`."""
    return type("CappedScores", (core,), {"score_cap": cap})


@cache
def scaling_queries(core: type, scale: QueryScale) -> type:
    """The core attention `core` that scales queries by the positions that travel with the stream (`PackedSequences`)."""

    class ScaledQueries(core):  # type: ignore[misc]
        """The same parameters; positions are those within a token's own sequence, whatever shares the stream with it."""

        def forward(self, query: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
            """`query` `[S/cp, (1,) heads, d]`, to what the core attention gives for it."""
            assert packed_seq_params is not None, "queries are scaled by the positions of packed streams"
            factors = query_factors(packed_seq_params.position_ids, scale).to(query.dtype)
            scaled = query * factors.view(-1, *[1] * (query.dim() - 1))
            return super().forward(scaled, *args, packed_seq_params=packed_seq_params, **kwargs)

    return ScaledQueries


def query_factors(position_ids: Tensor, scale: QueryScale) -> Tensor:
    """float32 `[S]`: the factor of the query of each token, by its position in its sequence, int64 `[S]`."""
    return 1 + scale.beta * torch.log(1 + torch.floor((position_ids + scale.shift) / scale.span))
