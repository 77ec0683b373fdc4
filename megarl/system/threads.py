"""Threads of a process: how many heaps they have, and how much of the processor. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

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


def step_back() -> None:
    """Give this thread, and those that it starts, a lower priority."""
    this_thread = threading.get_native_id()  # to Linux, which has priorities by thread, a process
    os.setpriority(os.PRIO_PROCESS, this_thread, min(19, os.getpriority(os.PRIO_PROCESS, this_thread) + NICENESS))
