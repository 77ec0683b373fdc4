"""A run's `samples.jsonl` as a sequence of samples that stay in the file: in memory is where each begins."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

from megarl.errors import DataError
from megarl.observe.growing_file import GrowingFile


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
