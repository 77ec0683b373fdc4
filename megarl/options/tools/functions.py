"""Python functions as tools: their schemas, and calls that end by their deadline whatever the function does.

An `async def` runs on the event loop and is cancelled; a `def` runs in a process of its own, which is started when needed, and
killed when a call does not end on time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import queue
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.data.told import MediaKeeper, PicturedText
from megarl.errors import EpisodeError
from megarl.options.tools.answers import ToolAnswer, failure_text, late, told_answer
from megarl.options.tools.toolbox import CallTool, two_of
from megarl.system.line_process import EndedError, LineProcess
from megarl.system.user_code import load_user_function

_START_DEADLINE_S = 120.0
_FEWEST = 4
"""Processes at most on a machine with fewer cores: a call that hangs must not keep all others waiting."""


class ToolProcesses:
    """A pool of as many processes as cores (at least four), each with one call at a time; further calls wait for one to
    be free."""

    def __init__(
        self, paths: Mapping[str, str], timeout_s: float, max_characters: int, pictures: MediaKeeper | None = None
    ) -> None:
        """`paths`: import path of each tool by its name; `pictures` keeps those of answers, in the processes."""
        self.timeout_s, self.max_characters = timeout_s, max_characters
        self._setting: dict[str, Any] = {
            "path": sys.path, "tools": dict(paths), "pictures": pictures.to_json() if pictures is not None else None
        }  # fmt: skip
        number = max(_FEWEST, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="tool")
        self._idle: queue.LifoQueue[LineProcess] = queue.LifoQueue()  # the last one used first, so that few are ever started
        for _ in range(number):
            # -P: no import from this folder
            self._idle.put(LineProcess([sys.executable, "-P", str(Path(__file__).with_name("child.py"))]))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call the tool called `name` and give its answer, or that it raised, died or took longer than `timeout_s` and
        was killed.

        Raises:
            EpisodeError: no process could be started, or the media folder cannot be written.
        """
        question = {"name": name, "arguments": arguments, "max_characters": self.max_characters}
        question["timeout_s"] = self.timeout_s + 1  # its own alarm is for when nobody is there to kill it
        line = json.dumps(question)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, name, line)

    def _call(self, name: str, line: str) -> ToolAnswer:
        process = self._idle.get()
        try:
            self._start(process)
            answer = process.ask(line, self.timeout_s)
        except TimeoutError:
            return late(name, self.timeout_s)
        except EndedError:
            return ToolAnswer.whole(f"error: the process of {name} died", "tool_errors")
        finally:
            self._idle.put(process)
        if answer["fault"] is not None:
            raise EpisodeError(answer["fault"])
        return ToolAnswer(PicturedText.of_json(answer["told"]), answer["characters"], answer["failure"])

    def _start(self, process: LineProcess) -> None:
        try:
            process.start(json.dumps(self._setting), _START_DEADLINE_S)
        except (TimeoutError, EndedError):
            raise EpisodeError(
                f"the process of the tools {', '.join(self._setting['tools'].values())} did not start within "
                f"{_START_DEADLINE_S:.0f} s, though they can be imported here"
            ) from None

    def close(self) -> None:
        """Kill the processes; calls under way fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while True:
            with contextlib.suppress(queue.Empty):
                self._idle.get_nowait().kill()
                continue
            return


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
        self._in_process: dict[str, str] = {}
        """Path of each that is no `async def`, by its name."""
        for path in paths:
            function = load_user_function(path, EpisodeError)
            name = getattr(function, "__name__", path.rpartition(":")[2])
            if name in self._functions:
                raise two_of(name)
            self._functions[name] = function
            self.schemas.append(schema_of(function, path))
            if not inspect.iscoroutinefunction(function):
                self._in_process[name] = path
        in_process = self._in_process
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
        if self._processes is not None and name in self._in_process:
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
