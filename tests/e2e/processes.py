"""Processes that end-to-end runs must not leave behind."""

from __future__ import annotations

import contextlib
import os

import psutil


def servers() -> set[int]:
    """Processes below this one that are SGLang's (Ray's own workers come and go)."""
    found = set()
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "sglang" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found
