"""All tools of a run, wherever they come from (functions, a sandbox, MCP servers), and the tools of one episode."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from megarl.errors import EpisodeError, nearest
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


class ToolBox:
    """The tools of a run by name. `schemas` is what the chat template's `tools=` takes."""

    def __init__(self, sources: Sequence[ToolSource]) -> None:
        """Raises:
        EpisodeError: two tools have one name.
        """
        self._sources = list(sources)
        self.schemas = [schema for source in sources for schema in source.schemas]
        self._home: dict[str, ToolSource] = {}
        for source in sources:
            for schema in source.schemas:
                name = schema["function"]["name"]
                if name in self._home:
                    raise two_of(name)
                self._home[name] = source

    def __contains__(self, name: object) -> bool:
        return name in self._home

    @contextlib.asynccontextmanager
    async def begun(self, row: Mapping[str, Any]) -> AsyncIterator[CallTool]:
        """The tools of one episode, on a prompt's row; what they keep for it goes with the block."""
        async with contextlib.AsyncExitStack() as stack:
            calls = [(source, await stack.enter_async_context(source.begun(row))) for source in self._sources]

            async def call(name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
                home = self._home.get(name)
                if home is None:
                    known = ", ".join(self._home)
                    hint = nearest(name, self._home)
                    return ToolAnswer.whole(f"error: there is no tool '{name}'{hint}; there are {known}", "tool_errors")
                return await next(call_tool for source, call_tool in calls if source is home)(name, arguments)

            yield call

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call the tool called `name` and give its answer to `arguments`, or what went wrong, in an episode of this call's own.

        Raises:
            EpisodeError: a tool's process did not start, or the media folder cannot be written. Whatever a tool does is an
                answer.
        """
        async with self.begun({}) as call:
            return await call(name, arguments)

    def close(self) -> None:
        """End what the tools run in."""
        for source in self._sources:
            source.close()
