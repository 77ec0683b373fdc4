"""Text made of a row's columns by a template, and the prompt that `data.prompt` makes."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from megarl.config.row_template import pieces_of
from megarl.data.rows import Row, RowPlace, value_of
from megarl.errors import DataError


def fill(template: str, row: Row, field: str, place: RowPlace | str) -> str:
    """The text that `template`, the config's `field`, makes of `row`; white space at its end is left out.

    A column that is null is an empty text.

    Raises:
        DataError: the row lacks a column, or has something else than text or a number there, or nothing in any column.
    """
    texts = []
    for text, column, form in pieces_of(template):
        texts.append(text)
        if column is not None:
            value = value_of(row, column, field, place)
            texts.append(_listed(value, column, form, field, place) if form else _text(value, column, field, place))
    if not any(text.strip() for text in texts[1::2]):
        raise DataError(f"{place} has nothing in the columns that {field} names; one of them must have a text")
    return "".join(texts).rstrip()


def with_prompt(row: Row, template: str | None, key: str, place: RowPlace | str) -> Row:
    """`row` with what `data.prompt` makes of it under `key`; `row` itself if that is null."""
    return row if template is None else {**row, key: fill(template, row, "data.prompt", place)}


def _text(value: Any, column: str, field: str, place: RowPlace | str) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    forms = f"; a list is written as {{{column}:letters}} or {{{column}:list}}" if isinstance(value, list | Mapping) else ""
    raise DataError(f"{place} has a {type(value).__name__} under '{column}' ({field}); it must be a text or a number{forms}")


def _listed(value: Any, column: str, form: str, field: str, place: RowPlace | str) -> str:
    if isinstance(value, Mapping):  # as ARC has its choices: {"text": [...], "label": [...]}
        value = value.get("text", list(value.values()))
    if not isinstance(value, list) or not value or not all(isinstance(item, str | int | float) for item in value):
        raise DataError(
            f"{place} has {value!r:.80} under '{column}' ({field}); with :{form} it must be a list of texts or numbers"
        )
    if form == "list":
        return ", ".join(map(str, value))
    if len(value) > len(ascii_uppercase):
        raise DataError(
            f"{place} has {len(value)} items under '{column}' ({field}); there are letters for {len(ascii_uppercase)}"
        )
    return "\n".join(f"{letter}. {item}" for letter, item in zip(ascii_uppercase, value, strict=False))
