"""A batch system's warning that a job's time is over: the run saves after the step in progress and leaves."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """While entered, notes SIGTERM and SIGUSR1 in `received`; the second one interrupts at once, as Ctrl-C does.

    Only a process's main thread can be told of signals; entered in another, it notes nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in WARNINGS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
