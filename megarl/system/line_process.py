"""A child process that answers lines of JSON, one for each line it is given: started when needed, killed when it is late."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
import weakref
from collections.abc import Sequence
from typing import Any


class EndedError(Exception):
    """The process ended by itself."""


class LineProcess:
    """One process, in a session of its own; it must end by itself when its input closes.

    One thread asks it at a time; another one may end it meanwhile, which raises `EndedError` in the first.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._process: subprocess.Popen[bytes] | None = None
        self._left = b""

    @property
    def pid(self) -> int | None:
        """Id of the process and of its session; None where none runs."""
        return self._process.pid if self._process is not None else None

    def start(self, first: str, timeout_s: float) -> Any:
        """Start it unless it runs, and give it the line `first`; its answer, or None if it had been started.

        Raises:
            TimeoutError: no answer came in time, and the process was killed.
            EndedError: it ended without one.
        """
        if self._process is not None:
            return None
        self._left = b""
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that what it starts is killed with it
        )
        # Python keeps a `Popen` whose process runs, with its pipes: the input of one that nobody holds any more would stay open
        weakref.finalize(self, _close, self._process).atexit = False
        return self.ask(first, timeout_s)

    def ask(self, line: str, timeout_s: float) -> Any:
        """The answer to `line`; the process is killed if it does not come. Raises as `start`."""
        try:
            self._write(line)
            return self._read(timeout_s)
        except BaseException:
            self.kill()
            raise

    def _write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # ValueError: it was closed by `end`
            raise EndedError from None

    def _read(self, timeout_s: float) -> Any:
        """The next line of the process, read as JSON."""
        if self._process is None:
            raise EndedError
        stdout, until = self._process.stdout, time.monotonic() + timeout_s
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(stdout, selectors.EVENT_READ)
                while b"\n" not in self._left:
                    if not selector.select(max(until - time.monotonic(), 0)):
                        raise TimeoutError
                    chunk = os.read(stdout.fileno(), 1 << 16)
                    if not chunk:
                        raise EndedError
                    self._left += chunk
            except ValueError:  # it was closed by `end`
                raise EndedError from None
        line, _, self._left = self._left.partition(b"\n")
        return json.loads(line)

    def end(self, timeout_s: float) -> bool:
        """Close its input and wait for it to end; kill it after `timeout_s`. Whether it ended by itself."""
        process = self._process
        if process is None:
            return True
        _close(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        ended = process.returncode == 0
        self.kill()
        return ended

    def kill(self) -> None:
        """End the process and what it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # its own group, made by start_new_session
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close its input."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
