"""The reader of files of JSON lines that a run writes, read on from where one was: their rows; samples are in `sample_file.py`.

Every line is checked (`record_types.py`). One that is damaged or foreign is left out and counted; `damage` says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megarl.errors import counted
from megarl.observe.record_lines import LineCheck, metrics_line

LONGEST_LINE = 1 << 26
"""Bytes of a line that are read: what is longer would take many times as much memory."""


class GrowingFile(ABC):
    """The whole lines of a file that are what it holds; none if there is no file. `end` is where the next one will begin."""

    _first: tuple[int, str]

    def __init__(self, file: Path, check: LineCheck) -> None:
        """`check` gives a line's object, or raises ValueError. Raises as `read_on`."""
        self.file, self._check = file, check
        self.end = 0
        self._inode: int | None = None
        self._forget_damage()
        self.read_on()

    def read_on(self) -> None:
        """Take what was written since; from the beginning if the file is another or shorter.

        Raises:
            OSError: it cannot be read.
        """
        now = self.file.stat() if self.file.is_file() else None
        if now is None or now.st_ino != self._inode or now.st_size < self.end:
            self._inode, self.end = None if now is None else now.st_ino, 0
            self._forget_damage()
            self.forget()
        if now is None or now.st_size == self.end:
            return
        with self.file.open("rb") as file:
            file.seek(self.end)
            for line, nbytes in whole_lines(file):  # what has no end is being written, or was cut off
                self._lines += 1
                try:
                    content = self._check(line) if nbytes <= LONGEST_LINE else _refuse_long()
                except ValueError as error:
                    self._leave_out(str(error))
                else:
                    self.take(content, nbytes)
                self.end += nbytes

    @property
    def damage(self) -> str | None:
        """A sentence on the lines that were left out; None: there are none."""
        if not self._left_out:
            return None
        which = f"line {self._first[0]} is" if self._left_out == 1 else f"{counted(self._left_out, 'line')} are"
        first = "" if self._left_out == 1 else f"first line {self._first[0]}, "
        return f"{self.file}: {which} damaged or not of this file, and left out ({first}{self._first[1]})"

    def _leave_out(self, why: str) -> None:
        if not self._left_out:
            self._first = (self._lines, why)
        self._left_out += 1

    def _forget_damage(self) -> None:
        self._lines = self._left_out = 0
        self._first = (0, "")

    @abstractmethod
    def forget(self) -> None:
        """Nothing was taken yet."""

    @abstractmethod
    def take(self, content: dict[str, Any], nbytes: int) -> None:
        """A line of `nbytes`, which begins at `end`, holds `content`."""


class RowFile(GrowingFile):
    """The rows of a file, `rows`; by default of a `metrics.jsonl`."""

    rows: list[dict[str, Any]]

    def __init__(self, file: Path, check: LineCheck = metrics_line) -> None:
        super().__init__(file, check)

    def forget(self) -> None:
        self.rows = []

    def take(self, content: dict[str, Any], nbytes: int) -> None:
        self.rows.append(content)


def whole_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """The lines of a file from where it is that have an end, and their bytes; of one above `LONGEST_LINE` a part of it."""
    while line := file.readline(LONGEST_LINE + 1):
        nbytes, piece = len(line), line
        while not piece.endswith(b"\n"):
            piece = file.readline(LONGEST_LINE)
            nbytes += len(piece)
            if not piece:
                return
        yield line, nbytes


def _refuse_long() -> dict[str, Any]:
    raise ValueError(f"it is longer than {LONGEST_LINE >> 20} MiB")
