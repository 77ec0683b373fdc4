"""Threads that leave the processor to whoever else wants it. Linux."""

from __future__ import annotations

import os
import threading

NICENESS = 10


def step_back() -> None:
    """Give this thread, and those that it starts, a lower priority."""
    this_thread = threading.get_native_id()  # to Linux, which has priorities by thread, a process
    os.setpriority(os.PRIO_PROCESS, this_thread, min(19, os.getpriority(os.PRIO_PROCESS, this_thread) + NICENESS))
