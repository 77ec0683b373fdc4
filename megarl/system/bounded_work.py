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
from typing import TypeVar

import psutil

T = TypeVar("T")
POLL_S = 0.05


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
    """Limit that ended it."""


class _Watch:
    """The thread that looks on, started with the first work; it sleeps while there is none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._works: list[_Work] = []
        self._thread: threading.Thread | None = None

    def begin(self, work: _Work) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_on, name="bounded-work", daemon=True)
                self._thread.start()
            self._works.append(work)
            self._changed.notify()

    def end(self, work: _Work) -> None:
        """Nothing is raised in the work's thread from here on."""
        with self._changed:
            self._works = [other for other in self._works if other is not work]
            if work.bound:
                _raise_in(work.thread, None)

    def _look_on(self) -> None:
        while True:
            with self._changed:
                while not self._works:
                    self._changed.wait()
                for work in self._works:
                    if not work.bound and (bound := _reached(work)):
                        work.bound = bound
                        _raise_in(work.thread, _Ended)
            time.sleep(POLL_S)


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.__init__)  # type: ignore[misc] # a fork has neither its thread nor who holds its lock


def bounded(work: Callable[[], T], *, time_s: float, more_bytes: int) -> T:
    """Run `work` and give what it returns.

    Raises:
        BoundReachedError: it took more than `time_s` seconds, or this process grew by more than `more_bytes` meanwhile.
    """
    watched = _Work(threading.get_ident(), time.monotonic() + time_s, _resident_bytes() + more_bytes)
    try:
        _WATCH.begin(watched)
        try:
            return work()
        finally:
            _WATCH.end(watched)
    except _Ended:
        _WATCH.end(watched)
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
