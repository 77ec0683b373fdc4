"""Seconds of a vision tower's forward passes: by the clock, on a GPU by events that nobody waits for while it works."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class TowerTime:
    """Adds up the seconds of what is done in `with times.measured(device):`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        """Count what is done within, on `device`."""
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def take(self) -> float:
        """Seconds since the last call; waits for the device, so it is asked when the device has done its work."""
        if self._events:
            self._events[-1][1].synchronize()
        seconds = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self._seconds, self._events = 0.0, []
        return seconds
