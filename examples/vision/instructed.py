"""Rows of a file with an instruction behind each prompt: how R1-V, EasyR1 and Open-R1-Video ask for a form of answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.config.sources import SourceConfig
from megarl.data.prompts import rows_of
from megarl.data.rows import Row


def instructed(source: str, path: str, instruction: str, key: str = "problem", **settings: Any) -> Iterator[Row]:
    """The rows of `path`, with a space and `instruction` behind the text under `key`; `settings` are those of a data source."""
    for row in rows_of(SourceConfig(source=source, path=path, **settings)):  # type: ignore[arg-type]
        yield row | {key: f"{row[key]} {instruction}"}
