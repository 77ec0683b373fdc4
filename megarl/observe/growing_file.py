"""Files of JSON lines that a run still writes, read on from where one was; and such a file's rows."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class GrowingFile(ABC):
    """The whole lines of a file; nothing if there is none. `end` is where the next line will begin."""

    def __init__(self, file: Path) -> None:
        """Raises as `read_on`."""
        self.file = file
        self.end = 0
        self._inode: int | None = None
        self.read_on()

    def read_on(self) -> None:
        """Take what was written since; from the beginning if the file is another or shorter.

        Raises:
            OSError: it cannot be read.
            ValueError, RecursionError: a line is no JSON.
        """
        now = self.file.stat() if self.file.is_file() else None
        if now is None or now.st_ino != self._inode or now.st_size < self.end:
            self._inode, self.end = None if now is None else now.st_ino, 0
            self.forget()
        if now is None or now.st_size == self.end:
            return
        with self.file.open("rb") as lines:
            lines.seek(self.end)
            for line in lines:
                if line.endswith(b"\n"):  # else it is being written, or was cut off
                    self.take(json.loads(line), len(line))
                    self.end += len(line)

    @abstractmethod
    def forget(self) -> None:
        """Nothing was taken yet."""

    @abstractmethod
    def take(self, content: Any, nbytes: int) -> None:
        """A line of `nbytes`, which begins at `end`, holds `content`."""


class RowFile(GrowingFile):
    """The rows of a `metrics.jsonl` or a file of its form, `rows`; names are kept once for all of them."""

    rows: list[dict[str, Any]]

    def forget(self) -> None:
        self.rows = []

    def take(self, content: Any, nbytes: int) -> None:
        self.rows.append({sys.intern(name): _number(value) for name, value in content.items()})


class EndRows(RowFile):
    """Only the first and the last of the rows."""

    def take(self, content: Any, nbytes: int) -> None:
        super().take(content, nbytes)
        del self.rows[1:-1]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
