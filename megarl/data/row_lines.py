"""A text file of rows as numbered lines of bounded length, and the errors that name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megarl.errors import DataError

LONGEST_ROW = 1 << 30
"""Bytes of a row at most: a file whose text never ends a line, as unpacking a small one may give, is refused."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

NumberedRow = tuple[int, dict[str, Any]]
"""The line that a row begins on, counted from 1, and the row."""


@dataclass(frozen=True)
class TextFile:
    """A file of rows, the kind that it is read as, and a function that opens it, unpacked."""

    path: Path
    kind: str
    open: Callable[[], IO[bytes]]

    @property
    def is_json_file(self) -> bool:
        """Return whether its name says that it is one JSON value (`.json`) and not one a line."""
        return ".json" in [suffix.lower() for suffix in self.path.suffixes[-2:]]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Every line with its number, counted from 1; a byte order mark is no part of the first.

        Raises:
            DataError: a line is longer than `LONGEST_ROW`.
        """
        number = 0
        with self.open() as file:
            while line := file.readline(LONGEST_ROW + 1):
                number += 1
                if len(line) > LONGEST_ROW:
                    raise self.error(number, f"is longer than {LONGEST_ROW >> 20} MB; a row may be at most that")
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line

    def error(self, line: int, sentence: str) -> DataError:
        """The error that says `sentence` of a line."""
        return DataError(f"'{self.path}' line {line} {sentence}")

    def text(self, line: int, content: bytes) -> str:
        """A line's content as text.

        Raises:
            DataError: it is not UTF-8.
        """
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self.error(line, f"is not valid UTF-8: {error.reason}") from None
