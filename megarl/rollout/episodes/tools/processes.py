"""The processes that synchronous tools run in: started when needed, killed when a call does not end on time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.data.told_pictures import PicturedText, PictureKeeper
from megarl.errors import EpisodeError
from megarl.rollout.episodes.tools.answers import ToolAnswer, late

_START_DEADLINE_S = 120.0
_FEWEST = 4
"""Processes at most on a machine with fewer cores: a call that hangs must not keep all others waiting."""


class ToolProcesses:
    """As many processes as cores (at least four), each with one call at a time; further calls wait for one to be free."""

    def __init__(
        self, paths: Mapping[str, str], timeout_s: float, max_characters: int, pictures: PictureKeeper | None = None
    ) -> None:
        """`paths`: import path of each tool by its name; `pictures` keeps those of answers, in the processes."""
        self.timeout_s, self.max_characters = timeout_s, max_characters
        self._setting: dict[str, Any] = {
            "path": sys.path, "tools": dict(paths), "pictures": pictures.to_json() if pictures is not None else None
        }  # fmt: skip
        number = max(_FEWEST, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="tool")
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()  # the last one used first, so that few are ever started
        for _ in range(number):
            self._idle.put(_Process(self._setting))

    @property
    def names(self) -> Collection[str]:
        """The tools that run here."""
        return self._setting["tools"].keys()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """What the tool called `name` answers, or that it raised, died or took longer than `timeout_s` and was killed.

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
            answer = process.ask(line, self.timeout_s)
        except TimeoutError:
            return late(name, self.timeout_s)
        except _EndedError:
            return ToolAnswer.whole(f"error: the process of {name} died", "tool_errors")
        finally:
            self._idle.put(process)
        if answer["fault"] is not None:
            raise EpisodeError(answer["fault"])
        return ToolAnswer(PicturedText.of_json(answer["told"]), answer["characters"], answer["failure"])

    def close(self) -> None:
        """Kill the processes; calls under way fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while True:
            with contextlib.suppress(queue.Empty):
                self._idle.get_nowait().kill()
                continue
            return


class _EndedError(Exception):
    """The process ended by itself."""


class _Process:
    """One process; it ends by itself when its input closes."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self._setting = setting
        self._process: subprocess.Popen[bytes] | None = None
        self._left = b""

    def ask(self, line: str, timeout_s: float) -> Any:
        """The answer to `line`; the process is killed if it does not come."""
        try:
            if self._process is None:
                self._start()
            self._write(line)
            return self._read(timeout_s)
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        program = Path(__file__).with_name("child.py")
        self._left = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program)],  # -P: this folder must not become an import path
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that what a tool starts is killed with it
        )
        self._write(json.dumps(self._setting))
        try:
            self._read(_START_DEADLINE_S)
        except (TimeoutError, _EndedError):
            raise EpisodeError(
                f"the process of the tools {', '.join(self._setting['tools'].values())} did not start within "
                f"{_START_DEADLINE_S:.0f} s, though they can be imported here"
            ) from None

    def _write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _EndedError from None

    def _read(self, timeout_s: float) -> Any:
        """The next line of the process, read as JSON."""
        assert self._process is not None
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._left:
                if not selector.select(max(until - time.monotonic(), 0)):
                    raise TimeoutError
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise _EndedError
                self._left += chunk
        line, _, self._left = self._left.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """End the process and what it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # its own group, made by start_new_session
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process = None
