"""Number of heaps that glibc's allocator makes for a process's threads."""

from __future__ import annotations

import contextlib
import ctypes

M_ARENA_MAX = -8  # malloc.h
HEAPS = 2


def share_heaps() -> None:
    """Have all threads that begin later share `HEAPS` heaps. Of glibc's alone; others are left as they are.

    By default each thread gets one, up to eight for each core, and keeps what is freed in it: a driver of dozens of threads
    that allocate and free a little grows for hours.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)
