"""A process in which a user's agent acts (`agent_process.py`), seen from the run: lines go in, answers and prints come out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import IO, Any

from megarl.system.process_tree import descendants, end_tree


class FunctionProcess:
    """A process that runs. A thread writes to it: one whose function is busy does not read, and whoever writes must go on."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self.popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.is_ready = threading.Event()
        """Set once it has read the user's function, or has ended."""
        self.has_ended = False
        """Whether all that it answered has been read."""
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=_pass_on, args=(self.popen.stderr,), name="agent-output", daemon=True).start()
        threading.Thread(target=self._feed, name="agent-input", daemon=True).start()

    def write(self, line: dict[str, Any]) -> None:
        self._lines.put(json.dumps(line).encode() + b"\n")

    def _feed(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed where its answers are read
            while (line := self._lines.get()) is not None:
                left = memoryview(line)
                while left:  # not by `popen.stdin`, whose lock a thread that waits here would hold while the run exits
                    left = left[os.write(self.popen.stdin.fileno(), left) :]

    def answers(self) -> Iterator[dict[str, Any]]:
        """All that it answers, until it has ended."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.is_ready.set()
            yield json.loads(line)
        self.popen.wait()
        self._lines.put(None)
        self.has_ended = True
        self.is_ready.set()

    def kill(self) -> None:
        """End the process, and what it started."""
        left = descendants(self.popen.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        for process in left:
            end_tree(process.pid)
        self.popen.wait()


def _pass_on(output: IO[bytes]) -> None:
    """Print what an agent's process prints: by this process, whose texts steer no terminal (`system/terminal.py`)."""
    for line in output:
        sys.stderr.write(line.decode(errors="replace"))
