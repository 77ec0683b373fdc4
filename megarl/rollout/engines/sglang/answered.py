"""The columns of options that a server answers with each response (`sglang.py` of an option: `answered`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megarl.option_list import functions


class AnsweredColumn(Protocol):
    """A column `name`. Requests that ask for it have the fields `body`; without any it is in every answer."""

    @property
    def name(self) -> str: ...
    @property
    def body(self) -> Mapping[str, Any]: ...

    def read(self, answer: Mapping[str, Any], tokens: int, url: str) -> Any:
        """The value in an answer of the server at `url` that was computed from `tokens`; None: it has none.

        Raises:
            EngineError: the answer is not as the server gives it.
        """


def answered_columns(folder: str, arguments: Mapping[str, Any]) -> tuple[AnsweredColumn, ...]:
    """The columns that a server of the model in `folder` answers, which was started with these `arguments`."""
    columns = (answered(folder, arguments) for answered in functions("sglang", "answered"))
    return tuple(column for column in columns if column is not None)
