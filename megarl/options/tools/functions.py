"""Python functions as tools: their schemas, and calls that end by their deadline whatever the function does.

An `async def` runs on the event loop and is cancelled; a `def` runs in a process of its own, which is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from megarl.data.told import MediaKeeper
from megarl.errors import EpisodeError
from megarl.options.tools.answers import ToolAnswer, failure_text, late, told_answer
from megarl.options.tools.processes import ToolProcesses
from megarl.options.tools.source import CallTool, two_of
from megarl.system.user_code import load_user_function


class FunctionTools:
    """The functions of a run that are tools; a `ToolSource`."""

    def __init__(
        self, paths: Sequence[str], timeout_s: float, max_characters: int, pictures: MediaKeeper | None = None
    ) -> None:
        """Import the functions at `paths` (`package.module:function` or `path/to/file.py:function`).

        A call has `timeout_s` seconds from when it begins; no more than `max_characters` of an answer leave a process.
        `pictures` keeps those of answers; None: the model takes none.

        Raises:
            EpisodeError: a function cannot be imported or has no schema, or two have one name.
        """
        self.timeout_s, self._pictures = timeout_s, pictures
        self._functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[dict[str, Any]] = []
        in_process: dict[str, str] = {}
        for path in paths:
            function = load_user_function(path, EpisodeError)
            name = getattr(function, "__name__", path.rpartition(":")[2])
            if name in self._functions:
                raise two_of(name)
            self._functions[name] = function
            self.schemas.append(schema_of(function, path))
            if not inspect.iscoroutinefunction(function):
                in_process[name] = path
        self._processes = ToolProcesses(in_process, timeout_s, max_characters, pictures) if in_process else None

    @contextlib.asynccontextmanager
    async def begun(self, row: Mapping[str, Any]) -> AsyncIterator[CallTool]:
        """The same functions for every episode."""
        yield self.call

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call the tool called `name` and give its answer to `arguments`, or what went wrong.

        Raises:
            EpisodeError: the process of the tools did not start, or the media folder cannot be written. Whatever a tool does is
                an answer.
        """
        function = self._functions[name]
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return ToolAnswer.whole(f"error: {name}: {error}", "tool_errors")
        if self._processes is not None and name in self._processes.names:
            return await self._processes.call(name, arguments)
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                answer = await function(**arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the policy is told
            if isinstance(error, TimeoutError) and deadline.expired():
                return late(name, self.timeout_s)
            return ToolAnswer.whole(failure_text(error), "tool_errors")
        return await asyncio.to_thread(told_answer, answer, self._pictures)

    def close(self) -> None:
        """End the tools' processes."""
        if self._processes is not None:
            self._processes.close()


def schema_of(function: Callable[..., Any], path: str) -> dict[str, Any]:
    """The JSON schema of `function` by its type hints and its docstring with an `Args:` section, as chat templates take it.

    Raises:
        EpisodeError: a type hint, the docstring or the description of an argument is missing.
    """
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
        raise EpisodeError(
            f"the tool '{path}' has no schema: {error}; it needs type hints and a docstring that describes every argument "
            "under 'Args:'"
        ) from None
    schema["function"].pop("return", None)
    return schema
