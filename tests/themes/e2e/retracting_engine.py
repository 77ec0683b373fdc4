"""The embedded engine as one whose cache is full: it throws away what it computed of its responses, and computes it anew."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from megarl.rollout.engines.embedded import EmbeddedEngine

EVERY, WAITS_AT, PATIENCE_S = 3, 8, 60.0


class RetractingEngine(EmbeddedEngine):
    """All responses are retracted at every third token, and those of every request but the first wait for an update once."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._tokens: Counter[threading.Event] = Counter()
        """By request, which has an event for whoever cancels it."""

    def _wait_for_weights(self, call: Any) -> None:
        cancelled = call.cancelled
        self._tokens[cancelled] += 1
        if self._tokens[cancelled] % EVERY == 0:
            self._weights_epoch += 1
        is_first = cancelled is next(iter(self._tokens))
        if self._tokens[cancelled] == WAITS_AT and not is_first:
            version, ends_at = self.weight_version, time.monotonic() + PATIENCE_S
            while self.weight_version in (version, None) and not (cancelled.is_set() or self._stopped):
                assert time.monotonic() < ends_at, "no update came"
                self._turn.wait(timeout=0.05)
        super()._wait_for_weights(call)
