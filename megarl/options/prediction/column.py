"""The column `drafts`: what speculative decoding did for a response, in all turns; and a step's figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from megarl.data.columns import Column


@dataclass(frozen=True)
class DraftCounts:
    """Counts of speculative decoding for a response: passes that verified drafts, tokens drafted for them, those that stayed.

    A pass yields one token more than stayed of its draft. All zero without speculative decoding.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.passes + other.passes, self.drafted + other.drafted, self.accepted + other.accepted)


NAME = "drafts"
"""Of the column."""
NO_DRAFTS = DraftCounts()
"""Without speculative decoding."""


def draft_figures(counts: Iterable[DraftCounts]) -> dict[str, float]:
    """A step's metrics; none where no response was sampled with speculative decoding."""
    total = sum(counts, NO_DRAFTS)
    if not total.passes:
        return {}
    return {
        "rollout/acceptance_length": 1 + total.accepted / total.passes,
        "rollout/acceptance_rate": total.accepted / max(total.drafted, 1),
        "rollout/drafted_tokens": total.drafted,
        "rollout/accepted_tokens": total.accepted,
    }


def added(first: DraftCounts | None, second: DraftCounts | None, *, same_weights: bool) -> DraftCounts | None:
    """The counts of both pieces of a response; None where there are none."""
    total = (first or NO_DRAFTS) + (second or NO_DRAFTS)
    return total if total != NO_DRAFTS else None


COLUMN = Column(NAME, then=added, to_json=asdict, from_json=lambda record: DraftCounts(**record))
