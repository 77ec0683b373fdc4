"""Ends a process tree at once and without remains, by process id. Linux."""

from __future__ import annotations

import contextlib
import os

import psutil

# Python's and torch's caretakers: they remove semaphores and shared memory when the processes they serve are gone, then end.
HELPER_PROCESSES = ("multiprocessing.resource_tracker", "torch_shm_manager")
SESSION_TRIES = 20


def end_tree(root_pid: int, *, spare_root: bool = False, caretakers_s: float = 5.0) -> None:
    """Kill `root_pid` and all its descendants; returns when none of them runs.

    Caretakers are given `caretakers_s` seconds to clean up after the others. `spare_root` leaves the root itself running.
    """
    tree = descendants(root_pid) if spare_root else tree_of(root_pid)
    caretakers = [process for process in tree if _is_caretaker(process)]
    others = [process for process in tree if process not in caretakers]
    _kill(others)
    _, left = psutil.wait_procs(caretakers, timeout=caretakers_s)
    _kill(left)


def end_session(session: int) -> None:
    """Kill every process in the session, those that have lost their parents too."""
    for _ in range(SESSION_TRIES):
        processes = [process for process in psutil.process_iter() if _lives_in(process, session)]
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=1)


def _lives_in(process: psutil.Process, session: int) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    return False


def tree_of(root_pid: int) -> list[psutil.Process]:
    """The process and all its descendants, as far as they live."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(root_pid), *descendants(root_pid)]
    return []


def descendants(root_pid: int) -> list[psutil.Process]:
    """All living descendants of the process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(root_pid).children(recursive=True))
    return []


def _is_caretaker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return any(name in part for part in process.cmdline() for name in HELPER_PROCESSES)
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
