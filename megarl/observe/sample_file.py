"""The samples of a run, which stay in their file: kept of each are its place and the figures that choose among them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, overload

from megarl.errors import DataError
from megarl.observe.growing_file import GrowingFile
from megarl.observe.record_types import sample_line


class SampleFile(GrowingFile, Sequence[Mapping[str, Any]]):
    """The samples of whole lines; none if there is no file. `read_on` takes what was written since.

    Iterating, slices and `at` read the file, and raise DataError if it was damaged or exchanged meanwhile. Of each sample are
    at hand: `steps`, `groups` (a number that tells steps and groups apart), `characters` of its response and `tokens`.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file, sample_line)

    def forget(self) -> None:
        self._starts, self._sizes = array("Q"), array("I")
        self.steps, self.groups = array("q"), array("q")
        self.characters, self.tokens = array("I"), array("I")

    def take(self, content: dict[str, Any], nbytes: int) -> None:
        step = content["step"]
        self._starts.append(self.end)
        self._sizes.append(nbytes)
        self.steps.append(step)
        self.groups.append(hash((step, content["group_id"])))
        self.characters.append(len(content.get("response_text", "")))
        self.tokens.append(len(content.get("response_ids", ())))

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self.at(range(len(self)))

    @overload
    def __getitem__(self, place: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(place, int):
            return next(self.at([range(len(self))[place]]))
        return list(self.at(range(len(self))[place]))

    def at(self, places: Iterable[int]) -> Iterator[Mapping[str, Any]]:
        """The samples at these places, one after the other."""
        file: BinaryIO | None = None
        try:
            for place in places:
                file = file or self.file.open("rb")
                file.seek(self._starts[place])
                yield sample_line(file.read(self._sizes[place]))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.file} has changed while it was read: {error}") from error
        finally:
            if file is not None:
                file.close()
