"""The time that an agent spends itself, which its time limit counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OwnTime:
    """Seconds since it was made in which no turn of the policy was being sampled: an engine that is slow, or is lost and
    started anew, costs an agent nothing. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._sampled_s, self._under_way = clock, 0.0, 0
        self._began = self._stands_since = clock()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Let the clock stand meanwhile; several turns may be sampled at once."""
        if not self._under_way:
            self._stands_since = self._clock()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._sampled_s += self._clock() - self._stands_since

    @property
    def spent_s(self) -> float:
        """What the agent has spent so far."""
        until = self._stands_since if self._under_way else self._clock()
        return until - self._began - self._sampled_s
