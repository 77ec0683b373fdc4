"""Threads of a process: how many heaps they have, and how much of the processor. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

M_ARENA_MAX = -8  # malloc.h
HEAPS = 2
NICENESS = 10


def share_heaps() -> None:
    """Have all threads that begin later share `HEAPS` heaps. Of glibc's alone; others are left as they are.

    By default each thread gets one, up to eight for each core, and keeps what is freed in it: a driver of dozens of threads
    that allocate and free a little grows for hours.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)


@contextlib.contextmanager
def repeating(work: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Have a thread called `name` do `work` every `every_s` seconds meanwhile; it ends with the block."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def step_back() -> None:
    """Give this thread, and those that it starts, a lower priority."""
    this_thread = threading.get_native_id()  # to Linux, which has priorities by thread, a process
    os.setpriority(os.PRIO_PROCESS, this_thread, min(19, os.getpriority(os.PRIO_PROCESS, this_thread) + NICENESS))
