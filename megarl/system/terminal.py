"""Output of this process: text that steers no terminal, and output that goes away while a program works.

Texts of runs, models, rows and servers reach a terminal by `print`, by rich's consoles, by logging and in tracebacks. All of
these end in `sys.stdout` and `sys.stderr`, where `print_safely` writes control characters out. Only a `SafeConsole` passes,
with the colours and moves that rich itself makes.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, TextIO

from megarl.errors import written_out

GONE = (errno.EPIPE, errno.EIO)
"""Errors of writing to a pipe without a reader, and to a terminal that is no more."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MOVES_OF_BARS = re.compile(r"(\r|\x1b\[A)")
"""Begin of the line, and the line above: moves of tqdm's progress bars."""


def print_safely() -> None:
    """From now on what is printed steers no terminal; for this process's `sys.stdout` and `sys.stderr`, and those it forks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))


def outlive_readers() -> None:
    """From now on what is printed goes nowhere once nobody can read it, where it raised an error.

    It holds for this process's `sys.stdout` and `sys.stderr`, and for processes that it forks.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, SafeStream):
            stream.beneath = _Enduring(stream.beneath)
        else:
            setattr(sys, name, _Enduring(stream))


class SafeStream:
    """A text stream to which control characters are written out; colours of other libraries are left away."""

    def __init__(self, stream: Any) -> None:
        self.beneath = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)

    def write(self, text: str) -> int:
        if not text.isprintable():
            text = _COLOURS.sub("", text)
            parts = _MOVES_OF_BARS.split(text) if "\r" in text and _is_bar(sys._getframe().f_back) else [text]
            text = "".join(part if number % 2 else written_out(part) for number, part in enumerate(parts))
        self.beneath.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def _is_bar(caller: FrameType | None) -> bool:
    """Return whether tqdm writes; None: the interpreter does, a traceback."""
    return caller is not None and str(caller.f_globals.get("__name__")).startswith("tqdm.")


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
