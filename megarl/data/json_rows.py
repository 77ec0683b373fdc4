"""Rows of a JSON file: one object per line, one list of objects, or an object with such a list under `data`.

A list is read element by element, so that memory holds one of them however long the file is.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from megarl.data.row_lines import BYTE_ORDER_MARK, LONGEST_ROW, NumberedRow, TextFile
from megarl.errors import DataError

BLOCK = 1 << 20
"""Bytes that are read at once of a list."""
LONGEST_TRIED = 1 << 26
"""Bytes of a first line that is parsed to learn whether it is a row."""
NEAR_THE_END = 16
"""Characters: a fault so near the end of what was read may come of a value that goes on."""
FORMS = 'a list of objects, {"data": [...]}, or one object per line'
"""JSON that a `.json` file may be."""


def json_rows(file: TextFile) -> Iterator[NumberedRow]:
    """The rows of `file`: a `.json` file may have a list; blank lines of any other are no rows.

    Raises:
        DataError: names the file and the line that is no JSON object, or the list's element.
    """
    if file.is_json_file and (form := _form(file)) != "lines":
        with file.open() as opened:
            yield from _Values(file, opened).rows(in_object=form == "object")
        return
    for number, line in file.lines():
        if line.strip():
            row = _parsed(file, number, line)
            if not isinstance(row, dict):
                but = "but every line must be an object" + ("; a file of one array must end in .json" * isinstance(row, list))
                raise file.error(number, f"is a JSON {_json_type(row)}, {but}")
            yield number, row


def _form(file: TextFile) -> str:
    """`lines`, `list` or `object` (with a list in it), as the first lines tell."""
    lines = ((number, line) for number, line in _short_lines(file) if line.strip())
    _, first = next(lines, (0, b""))
    if not first.lstrip().startswith((b"[", b"{")):
        return "lines"
    if first.lstrip().startswith(b"["):
        return "list"
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return "object"
    rows = row.get("data")
    has_rows = isinstance(rows, list) and bool(rows) and all(isinstance(item, dict) for item in rows)
    return "object" if has_rows and next(lines, None) is None else "lines"


def _short_lines(file: TextFile) -> Iterator[tuple[int, bytes]]:
    with file.open() as opened:
        number = 0
        while line := opened.readline(LONGEST_TRIED):
            number += 1
            yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def _parsed(file: TextFile, number: int, line: bytes) -> Any:
    try:
        return json.loads(file.text(number, line))
    except (ValueError, RecursionError) as error:
        raise file.error(number, f"is not valid JSON: {error}") from None


class _Values:
    """JSON values of a file one after the other, with the line that each begins on."""

    def __init__(self, file: TextFile, opened: IO[bytes]) -> None:
        self.file, self.opened = file, opened
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.scan = json.JSONDecoder().raw_decode
        self.text, self.at, self.line, self.is_over = "", 0, 1, False

    def rows(self, *, in_object: bool) -> Iterator[NumberedRow]:
        """The objects of the list that the file is, or that the object that it is has under `data`."""
        if not in_object:
            yield from self._elements()
        else:
            found = False
            for _ in self._items("{", "}"):
                key = self._value()
                self._take(":")
                is_list = key == "data" and self._next() == "["
                found = found or is_list
                if is_list:
                    yield from self._elements()
                else:
                    self._value()
            if not found:
                raise DataError(f"'{self.file.path}' is one JSON object without a list under 'data'; it must be {FORMS}")
        if self._next():
            raise self.file.error(self.line, f"goes on behind the end of the JSON value; the file must be {FORMS}")

    def _elements(self) -> Iterator[NumberedRow]:
        for number, line in enumerate(self._items("[", "]")):
            row = self._value()
            if not isinstance(row, dict):
                element = f"element {number} (counted from 0) is a JSON {_json_type(row)}"
                raise DataError(f"'{self.file.path}' {element}, but every element must be an object (line {line})")
            yield line, row

    def _items(self, opening: str, closing: str) -> Iterator[int]:
        """The line of every item between brackets; whoever asks for the next one has read it."""
        self._take(opening)
        while self._next() != closing:
            yield self.line
            if self._next() != closing:
                self._take(",")
                if self._next() == closing:
                    raise self.file.error(self.line, f"is not valid JSON: a value must follow the comma before '{closing}'")
        self._take(closing)

    def _next(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            start = self.at
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            self.line += self.text.count("\n", start, self.at)
            if self.at < len(self.text) or not self._read_more():
                return self.text[self.at : self.at + 1]

    def _take(self, wanted: str) -> None:
        if self._next() != wanted:
            found = f"'{self._next()}'" if self._next() else "the end of the file"
            raise self.file.error(self.line, f"is not valid JSON: {found} stands where '{wanted}' must be")
        self.at += 1

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self.scan(self.text, self.at)
            except json.JSONDecodeError as error:
                goes_on = error.msg.startswith("Unterminated") or error.pos > len(self.text) - NEAR_THE_END
                if goes_on and self._read_more():
                    continue
                line = self.line + self.text.count("\n", self.at, error.pos)
                raise self.file.error(line, f"is not valid JSON: {error.msg}") from None
            except RecursionError as error:
                raise self.file.error(self.line, f"is not valid JSON: {error}") from None
            if end < len(self.text) or not self._read_more():  # a number may go on
                self.line += self.text.count("\n", self.at, end)
                self.at = end
                return value

    def _read_more(self) -> bool:
        """Read on, twice as much as is kept already, so that a long value is not parsed too often."""
        rest = self.text[self.at :]
        if self.is_over:
            return False
        if len(rest) > LONGEST_ROW:
            raise self.file.error(self.line, f"begins a value of more than {LONGEST_ROW >> 20} MB; a row may be at most that")
        read = self.opened.read(max(BLOCK, 2 * len(rest)))
        self.is_over = not read
        try:
            more = self.decode(read, final=self.is_over)
        except UnicodeDecodeError as error:
            line = self.line + rest.count("\n") + error.object[: error.start].count(b"\n")
            raise self.file.error(line, f"is not valid UTF-8: {error.reason}") from None
        if read:
            self.text, self.at = rest + more, 0
        return bool(read)


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]
