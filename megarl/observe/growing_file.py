"""Files of JSON lines that a run still writes, read on from where one was: their rows, or samples that stay in the file."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from megarl.errors import DataError


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


class SampleFile(GrowingFile, Sequence[Mapping[str, Any]]):
    """The samples of whole lines, with their `step`; none if there is no file. `read_on` takes what was written since.

    Iterating and slices read the file, and raise DataError if it was damaged or exchanged meanwhile.
    """

    def forget(self) -> None:
        self._starts = array("Q", [0])
        """Where each sample begins, and where the next one will."""

    def take(self, content: Any, nbytes: int) -> None:
        self._starts.append(self._starts[-1] + nbytes)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self._read(0, len(self))

    @overload
    def __getitem__(self, place: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(place, int):
            at = range(len(self))[place]
            return next(self._read(at, at + 1))
        first, last, step = place.indices(len(self))
        return list(self._read(first, last))[::step] if step > 0 else list(self)[place]

    def _read(self, first: int, last: int) -> Iterator[Mapping[str, Any]]:
        try:
            if first < last:
                with self.file.open("rb") as file:
                    file.seek(self._starts[first])
                    for start, end in pairwise(self._starts[first : last + 1]):
                        yield json.loads(file.read(end - start))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.file} has changed while it was read: {error}") from error


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
