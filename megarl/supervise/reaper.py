"""Nothing of a run outlives the process that watches it, not even if that is killed with -9. Linux.

Run as a program: waits until its parent is gone, gives what the kernel ends with it a moment, and kills what is left in the
session of the parent's attempt. Whatever an attempt starts is in its session, and no stranger can come into it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.system.own_temporary import remove_folders
from megarl.system.process_exit import wait_for_parent
from megarl.system.process_tree import end_session

GRACE_S = 2.0
"""For what ends by itself, and for those that remove its shared memory."""


def start_reaper(session: int, folders: Sequence[Path] = ()) -> None:
    """Start the program that ends everything in `session`, the id of an attempt that leads one, when this process is gone.

    It then removes `folders`, the attempt's temporary ones.
    """
    program = [sys.executable, "-P", __file__, str(os.getpid()), str(session), *map(str, folders)]
    silent = [(os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_RDWR, 0) for output in range(3)]  # nobody waits for its output
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # megarl may not be installed
    os.posix_spawn(sys.executable, program, environment, file_actions=silent, setsid=True)


if __name__ == "__main__":
    wait_for_parent(int(sys.argv[1]))
    time.sleep(GRACE_S)
    end_session(int(sys.argv[2]))
    remove_folders(sys.argv[3:])
