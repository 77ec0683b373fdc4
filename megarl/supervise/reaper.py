"""Nothing of a run outlives the process that watches it, not even if that is killed with -9. Linux.

Run as a program: waits until its parent is gone, gives what the kernel ends with it a moment, and kills what is left in the
session of the parent's attempt. Whatever an attempt starts is in its session, and no stranger can come into it.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

import psutil

GRACE_S = 2.0
"""For what ends by itself, and for those that remove its shared memory."""
TRIES = 20


def start_reaper(session: int) -> None:
    """Start the program that ends everything in `session`, the id of an attempt that leads one, when this process is gone."""
    program = [sys.executable, "-P", __file__, str(os.getpid()), str(session)]
    silent = [(os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_RDWR, 0) for output in range(3)]  # nobody waits for its output
    os.posix_spawn(sys.executable, program, os.environ, file_actions=silent, setsid=True)


def wait_for_parent(pid: int) -> None:
    """Return when the parent, whose process id was `pid`, is gone."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        if os.getppid() == pid:
            select.select([handle], [], [])


def end_session(session: int) -> None:
    """Kill every process in the session."""
    for _ in range(TRIES):
        found = [process for process in psutil.process_iter() if _lives_in(process, session)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def _lives_in(process: psutil.Process, session: int) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__":
    wait_for_parent(int(sys.argv[1]))
    time.sleep(GRACE_S)
    end_session(int(sys.argv[2]))
