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

from megarl.system.process_tree import end_session

GRACE_S = 2.0
"""For what ends by itself, and for those that remove its shared memory."""


def start_reaper(session: int) -> None:
    """Start the program that ends everything in `session`, the id of an attempt that leads one, when this process is gone."""
    program = [sys.executable, "-P", __file__, str(os.getpid()), str(session)]
    silent = [(os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_RDWR, 0) for output in range(3)]  # nobody waits for its output
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # megarl may not be installed
    os.posix_spawn(sys.executable, program, environment, file_actions=silent, setsid=True)


def wait_for_parent(pid: int) -> None:
    """Return when the parent, whose process id was `pid`, is gone."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        if os.getppid() == pid:
            select.select([handle], [], [])


if __name__ == "__main__":
    wait_for_parent(int(sys.argv[1]))
    time.sleep(GRACE_S)
    end_session(int(sys.argv[2]))
