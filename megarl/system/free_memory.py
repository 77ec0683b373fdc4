"""Memory that a process has freed and its allocator keeps."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_free_memory() -> None:
    """Return free pages to the machine, from the middle of the heap too; glibc alone is able to (`malloc_trim(3)`)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
