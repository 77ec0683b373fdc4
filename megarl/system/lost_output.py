"""Standard output that goes away while a program works: a reader such as `head` that left, a terminal that was closed."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO

GONE = (errno.EPIPE, errno.EIO)
"""Errors of writing to a pipe without a reader, and to a terminal that is no more."""


def outlive_readers() -> None:
    """From now on what is printed goes nowhere once nobody can read it, where it raised an error.

    It holds for this process's `sys.stdout` and `sys.stderr`, and for processes that it forks.
    """
    sys.stdout, sys.stderr = _Enduring(sys.stdout), _Enduring(sys.stderr)


class _Enduring:
    """A text stream whose file becomes /dev/null when it cannot be written any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Let the stream's file be /dev/null, which also takes what the stream still holds."""
        if error.errno not in GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
