"""A run's `samples.jsonl` as a sequence of samples that stay in the file: in memory is where each begins."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from megarl.errors import DataError


class SampleFile(Sequence[Mapping[str, Any]]):
    """The samples of whole lines, with their `step`; none if there is no file. `read_on` takes what was written since.

    Iterating and slices read the file, and raise DataError if it was damaged or exchanged meanwhile.
    """

    def __init__(self, file: Path) -> None:
        """Raises as `read_on`."""
        self._file = file
        self._inode: int | None = None
        self._starts = array("Q", [0])
        """Where each sample begins, and where the next one will."""
        self.read_on()

    def read_on(self) -> None:
        """Look at what was written since; from the beginning if the file is another or shorter.

        Raises:
            OSError: it cannot be read.
            ValueError, RecursionError: a line is no JSON.
        """
        now = self._file.stat() if self._file.is_file() else None
        if now is None or now.st_ino != self._inode or now.st_size < self._starts[-1]:
            self._inode, self._starts = None if now is None else now.st_ino, array("Q", [0])
        if now is None or now.st_size == self._starts[-1]:
            return
        with self._file.open("rb") as lines:
            lines.seek(self._starts[-1])
            for line in lines:
                if line.endswith(b"\n"):  # else it is being written, or was cut off
                    json.loads(line)
                    self._starts.append(self._starts[-1] + len(line))

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
                with self._file.open("rb") as file:
                    file.seek(self._starts[first])
                    for start, end in pairwise(self._starts[first : last + 1]):
                        yield json.loads(file.read(end - start))
        except (OSError, ValueError) as error:
            raise DataError(f"{self._file} has changed while it was read: {error}") from error
