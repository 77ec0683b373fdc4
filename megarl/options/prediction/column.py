"""The column `drafts`: what speculative decoding did for a response, in all turns."""

from __future__ import annotations

from dataclasses import asdict

from megarl.data.columns import Column
from megarl.options.prediction.drafts import NAME, NO_DRAFTS, DraftCounts


def added(first: DraftCounts | None, second: DraftCounts | None, *, same_weights: bool) -> DraftCounts | None:
    """The counts of both pieces of a response; None where there are none."""
    total = (first or NO_DRAFTS) + (second or NO_DRAFTS)
    return total if total != NO_DRAFTS else None


COLUMN = Column(NAME, then=added, to_json=asdict, from_json=lambda record: DraftCounts(**record))
