"""Sources of tools: functions, a sandbox, MCP servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from megarl.errors import EpisodeError
from megarl.options.tools.answers import ToolAnswer

CallTool = Callable[[str, Mapping[str, Any]], Awaitable[ToolAnswer]]
"""A tool's answer, by its name and arguments. Whatever a tool does is an answer; `EpisodeError` where none can be had."""


class ToolSource(Protocol):
    """Tools of one kind."""

    schemas: list[dict[str, Any]]
    """As the chat template's `tools=` takes them."""

    def begun(self, row: Mapping[str, Any]) -> AbstractAsyncContextManager[CallTool]:
        """The tools of one episode, on a prompt's row."""
        ...

    def close(self) -> None:
        """End what all episodes share."""
        ...


def two_of(name: str) -> EpisodeError:
    """The error of a name that two tools have."""
    return EpisodeError(f"rollout.episode.tools has two tools called '{name}'; their names must differ")
