"""A data row, where it comes from, and how error messages name it: `data.train ('rows.jsonl') line 7`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.sources import FILE_SOURCES
from megarl.data.data_source import DataSource as DataSource
from megarl.data.data_source import Row as Row
from megarl.errors import DataError, nearest

SAME_THING = (
    ("response", "completion", "output"),
    ("prompt", "question", "problem", "input", "instruction"),
    ("answer", "solution", "reward_model"),
    ("messages", "conversations"),
    ("label", "score"),
)
"""Keys that trainers use for one thing: in an error, what a missing one may be called."""


@dataclass(frozen=True)
class Origin:
    """The origin of rows: the config section (empty where it is not known), and its source if it is known."""

    section: str
    source: DataSource | None = None

    def __str__(self) -> str:
        if self.source is None:
            return self.section
        return f"{self.section} ({describe_source(self.source)})" if self.section else describe_source(self.source)


@dataclass(frozen=True)
class RowPlace:
    """Row `number` (counted from 0) of `origin`; a file is searched for its line only when a message is written."""

    origin: Origin
    number: int

    def __str__(self) -> str:
        source, line = self.origin.source, None
        if source is not None and source.source in FILE_SOURCES:
            from megarl.data.row_folder import line_of_row  # read where an error is told alone

            line = line_of_row(source, self.number)
        return f"{self.origin} {line or f'row {self.number} (counted from 0)'}"


def value_of(row: Row, key: str, field: str, place: RowPlace | str) -> Any:
    """The value of `row` under `key`, which the config's `field` names.

    `a.b` is also key `b` of the mapping under `a`, and `a.0` the first item of the list under `a`.

    Raises:
        DataError: the row, named as `place`, has no such key.
    """
    value: Any = row
    path = list[str]()
    for name in [key] if key in row else key.split("."):
        if isinstance(value, list) and name.isdigit():
            if int(name) >= len(value):
                has = f"'{'.'.join(path)}' of {place} has {len(value)} items"
                raise DataError(f"{has}, but '{key}' ({field}) names item {name}, counted from 0")
            value = value[int(name)]
            path.append(name)
            continue
        if not isinstance(value, dict) or name not in value:
            within = f"'{'.'.join(path)}' of {place}" if path else f"{place}"
            if not isinstance(value, dict):
                raise DataError(f"{within} is {value!r:.80}, but '{key}' ({field}) names a key in it")
            hint = nearest(name, value) or _same_thing(name, value)
            raise DataError(f"{within} has no key '{name}' ({field}){hint}; it has {', '.join(value)}")
        value = value[name]
        path.append(name)
    return value


def find_value(row: Mapping[str, Any], key: str) -> Any:
    """The value that `value_of` finds, or None where there is nothing."""
    value: Any = row
    for name in [key] if key in row else key.split("."):
        if isinstance(value, list) and name.isdecimal():
            value = value[int(name)] if int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def check_text(text: str, place: RowPlace | str) -> None:
    """Refuse a text that has no tokens: JSON may write half a character (`"\\ud800"`).

    Raises:
        DataError: names the row and the place in the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} has {text[error.start]!r} as character {error.start} (counted from 0) of a text, which is half a "
            "character and no text; remove it"
        ) from None


def _same_thing(key: str, row: Row) -> str:
    """A hint at the key by which another trainer calls what `key` names here."""
    others = next((names for names in SAME_THING if key in names), ())
    other = next((name for name in others if name in row), None)
    return f" (did you mean '{other}'?)" if other is not None else ""


def describe_source(source: DataSource) -> str:
    """The source as error messages name it: its file, task or function."""
    if source.source in FILE_SOURCES:
        parts = [part for part in (source.name, source.split) if part is not None] if source.source == "dataset" else []
        return f"'{source.path}'" + (f" ({', '.join(parts)})" if parts else "")
    if source.source == "mixture":
        return f"a mixture of {len(source.parts)} sources"
    return f"{source.source} source '{source.name}'"
