"""The processes that synchronous tools run in: started when needed, killed when a call does not end on time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.data.told import MediaKeeper, PicturedText
from megarl.errors import EpisodeError
from megarl.options.tools.answers import ToolAnswer, late
from megarl.system.line_process import EndedError, LineProcess

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
            self._idle.put(self._process())

    @property
    def names(self) -> Collection[str]:
        """The tools that run here."""
        return self._setting["tools"].keys()

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

    def _process(self) -> LineProcess:
        return LineProcess([sys.executable, "-P", str(Path(__file__).with_name("child.py"))])  # -P: no import from this folder

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
