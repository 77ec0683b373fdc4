"""Rows of a file of comma- or tab-separated values: keys are in its first line, and every cell is text.

Cells may stand in double quotes and have line breaks in them (RFC 4180). Nothing is guessed: `007` stays `007`, and an
empty cell is an empty text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

from megarl.data.row_lines import LONGEST_ROW, NumberedRow, TextFile

SEPARATORS = {"csv": (",", "comma"), "tsv": ("\t", "tab")}
"""Kinds -> what stands between two cells."""


def csv_rows(file: TextFile) -> Iterator[NumberedRow]:
    """The rows of `file`, whose kind is `csv` or `tsv`.

    Raises:
        DataError: names the line that is not UTF-8, has a quote that is not closed, or more or fewer cells than the first.
    """
    csv.field_size_limit(LONGEST_ROW)
    separator, named = SEPARATORS[file.kind]
    texts = (file.text(line, content) for line, content in file.lines())
    records = csv.reader(texts, delimiter=separator, strict=True)
    keys: list[str] | None = None
    line = 1
    try:
        for cells in records:
            if not cells:  # an empty line
                pass
            elif keys is None:
                keys = _checked_keys(cells, file, line, named)
            elif len(cells) != len(keys):
                counts = f"{len(cells)} cells, but the first line names {len(keys)} keys ({', '.join(keys)})"
                raise file.error(line, f"has {counts}; a cell with a {named} or a line break must stand in double quotes")
            else:
                yield line, dict(zip(keys, cells, strict=True))
            line = records.line_num + 1
    except csv.Error as error:
        raise file.error(line, f"is not valid {file.kind.upper()}: {_in_words(error)}") from None


def _checked_keys(cells: list[str], file: TextFile, line: int, named: str) -> list[str]:
    other = next((mark for mark in (";", "\t", ",") if len(cells) == 1 and mark in cells[0]), None)
    if other is not None:
        raise file.error(line, f"has {other!r} and no {named} between the names of keys; cells must be separated by a {named}")
    twice = next((key for at, key in enumerate(cells) if key in cells[:at]), None)
    if twice is not None:
        raise file.error(line, f"names the key '{twice}' twice; every key must have a name of its own")
    return cells


def _in_words(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return "a double quote opens a cell here that nothing closes"
    return f"{error} (inside a quoted cell a double quote is written twice)" if "expected after" in str(error) else str(error)
