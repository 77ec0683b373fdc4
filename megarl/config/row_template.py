"""Templates that make one text of several columns of a row: `"{instruction}\\n{input}"`.

As in Python's format strings, with named columns alone: `{a.b}` is key `b` inside `a`, `{options:letters}` a list as lines
`A. …`, `{numbers:list}` a list with commas, and `{{` and `}}` are braces.
"""

from __future__ import annotations

from functools import lru_cache
from string import Formatter
from typing import Annotated, Any

from pydantic import AfterValidator

LISTS = ("letters", "list")
"""Forms that a column may be written in; without one it is a text or a number."""

Piece = tuple[str, str | None, str]
"""Text, the column behind it (None: there is none), and the column's form."""


@lru_cache
def pieces_of(template: str) -> tuple[Piece, ...]:
    """The template in pieces.

    Raises:
        ValueError: a sentence about its braces, its columns or their forms.
    """
    try:
        parsed = list(Formatter().parse(template))
    except ValueError:
        raise ValueError(
            f"'{template}' has a brace without its partner; a brace of the text itself must be written twice, {{{{ or }}}}"
        ) from None
    pieces = []
    for text, column, form, conversion in parsed:
        if column is not None and (not column.strip() or column.isdigit() or conversion):
            written = f"{{{column}{f'!{conversion}' if conversion else ''}}}"
            raise ValueError(
                f"'{template}' has {written}, which names no column of a row; it must be {{name of a column}}, and a brace of "
                "the text itself must be written twice"
            )
        if form and form not in LISTS:
            allowed = " or ".join(f":{one}" for one in LISTS)
            raise ValueError(f"'{template}' has {{{column}:{form}}}; what follows a column's name must be {allowed}")
        pieces.append((text, column, form or ""))
    return tuple(pieces)


def columns_of(template: str) -> list[str]:
    """The columns that a template names."""
    return [column for _, column, _ in pieces_of(template) if column is not None]


def is_template(text: str) -> bool:
    """Return whether `text`, where a column may be named, is a template instead."""
    return "{" in text or "}" in text


def _checked_template(template: str) -> str:
    if not columns_of(template):
        raise ValueError(f"'{template}' names no column; it must have one in braces, such as {{question}}")
    return template


def _checked_column(text: str) -> str:
    return _checked_template(text) if is_template(text) else text


Template = Annotated[str, AfterValidator(_checked_template)]
ColumnOrTemplate = Annotated[str, AfterValidator(_checked_column)]


def with_prompt_key(tree: Any) -> Any:
    """A section as given, with a `prompt_key` under which rows keep the prompt that its `prompt` makes, where it names none.

    Raises:
        ValueError: `prompt_key` is one of the columns that `prompt` is made of.
    """
    if not isinstance(tree, dict) or not isinstance(template := tree.get("prompt"), str):
        return tree
    try:
        columns = columns_of(template)
    except ValueError:  # told where the field itself is read
        return tree
    key = tree.get("prompt_key") or ("question" if "prompt" in columns else "prompt")
    if key in columns:
        raise ValueError(f"prompt_key is '{key}', a column that prompt is made of; it must be another name, or be left out")
    return tree | {"prompt_key": key}
