"""Nothing of a run outlives the process that watches it, not even if that is killed with -9. Linux.

Run as a program: waits until its parent is gone, gives what the kernel ends with it a moment, and kills what is left of what
the parent had marked. The mark is a random word in the environment, which all that is started inherits and no stranger has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import sys
import time

import psutil

MARK = "MEGARL_RUN_MARK"
GRACE_S = 2.0
"""For what ends by itself, and for those that remove its shared memory."""
TRIES = 20


def stand_by() -> None:
    """Mark whatever this process starts from now on, and start the program that ends it after this process."""
    mark = os.environ[MARK] = secrets.token_hex(16)
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    program = [sys.executable, "-P", __file__, str(os.getpid()), mark]
    silent = [(os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_RDWR, 0) for output in range(3)]  # nobody waits for its output
    # in a session of its own: a signal to the run's process group is not for it
    os.posix_spawn(sys.executable, program, unmarked, file_actions=silent, setsid=True)


def wait_for_parent(pid: int) -> None:
    """Return when the parent, whose process id was `pid`, is gone."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        if os.getppid() == pid:
            select.select([handle], [], [])


def end_marked(mark: str) -> None:
    """Kill every process of this user that carries the mark."""
    for _ in range(TRIES):
        found = [process for process in psutil.process_iter() if _mark_of(process) == mark]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def _mark_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get(MARK)
    return None


if __name__ == "__main__":
    wait_for_parent(int(sys.argv[1]))
    time.sleep(GRACE_S)
    end_marked(sys.argv[2])
