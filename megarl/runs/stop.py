"""A batch system's warning, Ctrl-C, a closed terminal: the run saves after the step in progress and leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from megarl.system.process_exit import heeded

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequest:
    """While entered, notes SIGTERM, SIGUSR1 and SIGHUP in `received`; the second one interrupts at once.

    So it does with Ctrl-C (SIGINT) while `has_steps` says that there is work to lose; before that Ctrl-C interrupts at once.
    SIGHUP stays ignored where it was, as under nohup.
    Only a process's main thread can be told of signals; entered in another, it notes nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.has_steps = False
        """Whether a step of this run has begun."""
        self.tell: Callable[[], None] | None = None
        """Called in a thread of its own when the first signal was noted: handlers must not print."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in heeded((*WARNINGS, signal.SIGINT))}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None or (number == signal.SIGINT and not self.has_steps):
            raise KeyboardInterrupt
        self.received = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.tell is not None:
            threading.Thread(target=self.tell, name="told to stop", daemon=True).start()
