"""Python code of others that is run in this process, such as a chat template, ended when it takes too long or too much memory.

A thread looks on and raises an exception in the thread that works. One operation in C is not interrupted: the exception comes
behind it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from queue import SimpleQueue
from typing import TypeVar

import psutil

T = TypeVar("T")
POLL_S = 0.05
SOON_S = 0.001


class BoundReachedError(Exception):
    """The work was ended; says by which bound."""


class _Ended(BaseException):
    """Raised in the thread that works. Code that catches `Exception` does not catch it."""


@dataclass
class _Work:
    thread: int
    ends_at: float
    most_bytes: int
    bound: str = ""
    """Limit that ended it. The watch alone sets it, and `is_told`."""
    is_over: bool = False
    """Set by the work's thread alone: the watch raises nothing in it any more."""
    is_told: bool = False
    """Whether the watch, which has set `bound`, is through with it."""

    def end(self) -> None:
        """Nothing is raised in the work's thread from here on.

        The exception may come anywhere in here, once, so that this takes no lock. The watch sets `bound` and then looks at
        `is_over`, the work does both the other way round: one of them sees what the other has set.
        """
        self.is_over = True
        while self.bound and not self.is_told:
            time.sleep(SOON_S)
        if self.bound:
            _raise_in(self.thread, None)


class _Watch:
    """The thread that looks on, started with the first work; it sleeps while there is none."""

    def __init__(self) -> None:
        self._begun: SimpleQueue[_Work] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if there is none."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._look_on, name="bounded-work", daemon=True)
                    thread.start()
                    self._thread = thread

    def begin(self, work: _Work) -> None:
        self._begun.put(work)

    def _look_on(self) -> None:
        works: list[_Work] = []
        while True:
            if not works:
                works.append(self._begun.get())
            while not self._begun.empty():
                works.append(self._begun.get())
            for work in works:
                if not work.is_over and not work.bound and (bound := _reached(work)):
                    work.bound = bound
                    if not work.is_over:
                        _raise_in(work.thread, _Ended)
                    work.is_told = True
            works = [work for work in works if not work.is_over]
            time.sleep(POLL_S)


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.__init__)  # type: ignore[misc] # a fork has neither its thread nor who holds its lock


def bounded(work: Callable[[], T], *, time_s: float, more_bytes: int) -> T:
    """Run `work` and give what it returns.

    Raises:
        BoundReachedError: it took more than `time_s` seconds, or this process grew by more than `more_bytes` meanwhile.
    """
    watched = _Work(threading.get_ident(), time.monotonic() + time_s, _resident_bytes() + more_bytes)
    _WATCH.start()
    try:
        _WATCH.begin(watched)
        try:
            return work()
        finally:
            watched.end()
    except _Ended:
        watched.end()
        unit = f"{time_s:g} s" if watched.bound == "time" else f"{more_bytes >> 20} MiB of memory"
        raise BoundReachedError(f"took more than {unit}") from None


def _reached(work: _Work) -> str:
    if time.monotonic() > work.ends_at:
        return "time"
    return "memory" if _resident_bytes() > work.most_bytes else ""


def _resident_bytes() -> int:
    return int(_process(os.getpid()).memory_info().rss)


@lru_cache(maxsize=1)
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)  # to make one costs more than to render most conversations


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have the thread raise `error` before its next operation; None: take that back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error is not None else None)
