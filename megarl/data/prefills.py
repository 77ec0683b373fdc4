"""The share of prefixes that engines had computed already: counts that travel with responses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillCounts:
    """Tokens before the first one that was sampled, over all requests for a response: those `asked`, and those of them whose
    keys and values the engine had `cached`."""

    asked: int = 0
    cached: int = 0

    def __add__(self, other: PrefillCounts) -> PrefillCounts:
        return PrefillCounts(self.asked + other.asked, self.cached + other.cached)


NO_PREFILLS = PrefillCounts()
"""Counts of a response whose engine does not say."""


def prefill_figures(counts: Iterable[PrefillCounts]) -> dict[str, float]:
    """A step's metrics; none where no engine said what it computed."""
    total = sum(counts, NO_PREFILLS)
    if not total.asked:
        return {}
    return {
        "rollout/prompt_tokens": total.asked,
        "rollout/cached_tokens": total.cached,
        "rollout/cache_hit_rate": total.cached / total.asked,
    }
