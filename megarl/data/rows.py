"""A data row, where it comes from, and how error messages name it: `data.train ('rows.jsonl') line 7`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from megarl.errors import DataError, nearest

Row = dict[str, Any]


class DataSource(Protocol):
    """What is read of a `SourceConfig`."""

    @property
    def source(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def path(self) -> str | None: ...
    @property
    def args(self) -> dict[str, Any]: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def columns(self) -> dict[str, str]: ...
    @property
    def parts(self) -> Sequence[DataSource]: ...
    @property
    def weight(self) -> float: ...


@dataclass(frozen=True)
class Origin:
    """Where rows come from: the config section (empty where it is not known), and its source if it is known."""

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
        source = self.origin.source
        line = line_of_row(source.path, self.number) if source is not None and source.source == "jsonl" else None
        return f"{self.origin} row {self.number} (counted from 0)" if line is None else f"{self.origin} line {line}"


def value_of(row: Row, key: str, field: str, place: RowPlace) -> Any:
    """The value of `row` under `key`, which the config's `field` names.

    Raises:
        DataError: the row has no such key.
    """
    if key not in row:
        raise DataError(f"{place} has no key '{key}' ({field}){nearest(key, row)}; it has {', '.join(row)}")
    return row[key]


def describe_source(source: DataSource) -> str:
    """The source as error messages name it: its file, task or function."""
    if source.source in ("jsonl", "parquet", "dataset"):
        return f"'{source.path}'"
    if source.source == "mixture":
        return f"a mixture of {len(source.parts)} sources"
    return f"{source.source} source '{source.name}'"


def line_of_row(path: str | None, number: int) -> int | None:
    """The line of row `number` (counted from 0) in a JSONL file, whose blank lines are no rows; None if it cannot be read."""
    try:
        with Path(path or "").open("rb") as file:
            lines = (line for line, text in enumerate(file, start=1) if text.strip())
            return next(islice(lines, number, None), None)
    except OSError:
        return None
