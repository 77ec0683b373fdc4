"""Rows of a JSON file: one object per line, or one array of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.data.rows import Row
from megarl.errors import DataError


def json_rows(path: Path) -> Iterator[Row]:
    """The rows of `path`: a `.json` file may be an array; blank lines of any other are no rows.

    Raises:
        DataError: names the file and the line that is no JSON object, or the array's element.
    """
    with path.open("rb") as file:
        is_array = path.suffix == ".json" and file.read(4096).lstrip().startswith(b"[")
        file.seek(0)
        if is_array:
            for number, row in enumerate(_parsed(file.read(), f"'{path}'")):
                yield _checked(row, f"'{path}' element {number} (counted from 0)", "every element")
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _checked(_parsed(line, f"'{path}' line {number}"), f"'{path}' line {number}", "every line")


def _parsed(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not valid UTF-8: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not valid JSON: {error}") from None


def _checked(row: Any, place: str, what: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{place} is a JSON {_json_type(row)}, but {what} must be an object")
    return row


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]
