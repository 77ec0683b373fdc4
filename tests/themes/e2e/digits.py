"""A reward that a random model gets some of: the share of digits in the response."""

from __future__ import annotations

from megarl.data.sample import Sample


def share_of_digits(samples: list[Sample]) -> list[float]:
    """Digits over characters, 0 for an empty response."""
    return [sum(c.isdigit() for c in s.response_text) / max(len(s.response_text), 1) for s in samples]
