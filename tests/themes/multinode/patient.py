"""A reward that takes a second, in which a batch system can warn the run; loaded by its path, so it imports megarl alone."""

from __future__ import annotations

import time

from megarl.data.sample import Sample


def share_of_digits(samples: list[Sample]) -> list[float]:
    """Digits over characters, 0 for an empty response."""
    time.sleep(1.0)
    return [sum(c.isdigit() for c in s.response_text) / max(len(s.response_text), 1) for s in samples]
