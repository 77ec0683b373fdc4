"""A process's care for its own end: it goes with the one that started it, and what it said is in a log. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent() -> None:
    """Have the kernel kill this process as soon as the one that started it is gone, even while this one is stopped."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went in between
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_parent(pid: int) -> None:
    """Return when the parent, whose process id was `pid`, is gone."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        if os.getppid() == pid:
            select.select([handle], [], [])


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process instead of init's, and so can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """These signals, without SIGHUP where it is ignored: what `nohup` starts is to outlive the terminal."""
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def log_to_file(log_file: str | Path) -> None:
    """Append this process's output to `log_file`, which is its owner's alone, with the Python stacks if a signal such as
    SIGSEGV ends it."""
    path = Path(log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    faulthandler.enable(2)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
