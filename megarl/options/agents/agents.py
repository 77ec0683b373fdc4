"""Runs agents: a command for each episode, perhaps in its sandbox, or a function of the user's in processes that serve many.

An agent gets the address of the endpoint and a key of its own, and acts until it ends. What it starts is ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megarl.data.sample import Prompt
from megarl.errors import EpisodeError
from megarl.options.agents.function_process import FunctionProcess
from megarl.options.agents.server import LONGEST_S, SessionServer
from megarl.options.agents.session import AgentSession, History
from megarl.options.agents.task import AgentTask
from megarl.rollout.episodes.commands import CommandFolders
from megarl.rollout.episodes.turns import TurnTemplate

KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ")
"""Variables of the run's environment that a command has; everything else must be named."""
LAST_WORDS = 4096
"""Bytes of what an agent printed that are kept."""
START_S = 120.0
"""For a process of functions to start."""
GRACE_S = 5.0
"""For a function to end once it is cancelled."""


@dataclass(frozen=True)
class AgentEnd:
    """The end of an agent. `reward` is what it returned; `why` what it said last, where it `failed`, or who ended it.

    `with_process`: its process ended, perhaps by another episode's fault.
    """

    reward: float | None = None
    failed: bool = False
    with_process: bool = False
    was_ended: bool = False
    why: str = "it ended without an error"


class Agent(ABC):
    """A program that acts."""

    name: str

    async def get_ready(self) -> None:  # noqa: B027 - most share nothing
        """Start what all its episodes share, so that no episode's time is spent on it."""

    @abstractmethod
    async def run(self, task: AgentTask) -> AgentEnd:
        """Let it act until it ends; cancelling the call ends it and what it started."""

    @abstractmethod
    def close(self) -> None:
        """End what is left of it."""


class Agents:
    """The things that all episodes of agents share."""

    def __init__(
        self,
        agent: Agent,
        server: SessionServer,
        renderer: Callable[[Sequence[Mapping[str, Any]]], TurnTemplate],
        question: Callable[[Prompt], str],
        *,
        timeout_s: float,
        at_once: int,
        history: History = "tokens",
        sandboxes: CommandFolders | None = None,
    ) -> None:
        """`renderer` makes the chat template for a set of tools, `question` says what a prompt asks; `history` as in
        `AgentSession`. `sandboxes`: each episode has one, in which its agent may run commands."""
        self.history: History = history
        self._sandboxes = sandboxes
        self._agent, self._server, self._question = agent, server, question
        self.name, self.at_once = agent.name, asyncio.Semaphore(at_once)
        """Name of the agent in the config, and the places of those that act at the same time."""
        self._timeout_s = timeout_s
        self._make_renderer = renderer
        self._renderers: dict[str, TurnTemplate] = {}

    def renderer(self, tools: Sequence[Mapping[str, Any]]) -> TurnTemplate:
        """The chat template for `tools`.

        Raises:
            EpisodeError: it does not write them.
        """
        key = json.dumps(tools, sort_keys=True)
        if key not in self._renderers:
            self._renderers[key] = self._make_renderer(tools)
        return self._renderers[key]

    async def act(self, session: AgentSession, prompt: Prompt) -> AgentEnd:
        """Let an agent act in `session` until it ends, is out of time, or floods.

        Raises:
            MegarlError: an engine failed meanwhile, or the agent's processes do not start.
        """
        await self._agent.get_ready()
        async with contextlib.AsyncExitStack() as stack:
            sandbox = None
            if self._sandboxes is not None:
                sandbox = await stack.enter_async_context(self._sandboxes.opened(prompt.row))
            return await self._act(session, prompt, self._server.open(session, sandbox))

    async def _act(self, session: AgentSession, prompt: Prompt, key: str) -> AgentEnd:
        task = AgentTask(f"{self._server.url}/v1", key, self._server.models[0], self._question(prompt), prompt.row)
        acting: asyncio.Future[AgentEnd] = asyncio.ensure_future(self._agent.run(task))
        awaited: list[asyncio.Future[Any]] = [acting, session.failure]
        try:
            await asyncio.wait(awaited, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not any(one.done() for one in awaited):
                await session.settle()
            if acting.done():
                return acting.result()
            if session.failure.done():
                session.failure.result()
                return AgentEnd(was_ended=True, why="it went on asking beyond its limits")
            return AgentEnd(
                was_ended=True, why=f"it did not end within {self._timeout_s:g} s (rollout.episode.agent.timeout_s)"
            )
        finally:
            self._server.end(key)
            acting.cancel()
            await asyncio.gather(acting, return_exceptions=True)

    def close(self) -> None:
        """End the agents and the endpoint."""
        self._agent.close()
        self._server.close()
        if self._sandboxes is not None:
            self._sandboxes.close()


class CommandAgent(Agent):
    """A command line, started anew for every episode, in a folder of its own that goes with it.

    `{prompt}` and `{row.KEY}` in its arguments stand for the question and for a field of the row; no shell reads them. The
    task is on its input as JSON, and the endpoint in the variables that clients of OpenAI and Anthropic read.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], passed: Sequence[str]) -> None:
        """`environment` is added to the command's; `passed` are names of variables of the run that it gets too."""
        self.name = f"the agent {command[0]}"
        self._command, self._environment = list(command), dict(environment)
        self._passed = [*KEPT_VARIABLES, *passed]
        self._running: dict[int, str] = {}

    async def run(self, task: AgentTask) -> AgentEnd:
        folder = Path(tempfile.mkdtemp(prefix="megarl-agent-"))
        process = None
        try:
            process = self._start(task, folder)
            self._running[process.pid] = task.api_key
            output = _LastWords(process)
            code = await _exit_code(process)
            last_words = await output.until_now()
        except OSError as error:
            return AgentEnd(failed=True, why=f"it cannot be started: {error}")
        finally:
            if process is not None:
                await asyncio.shield(asyncio.to_thread(_end_agent, process, task.api_key))
                del self._running[process.pid]
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
        if code:
            return AgentEnd(failed=True, why=f"it exited with {code}: {last_words}")
        return AgentEnd()

    def _start(self, task: AgentTask, folder: Path) -> subprocess.Popen[bytes]:
        passed = {name: os.environ[name] for name in self._passed if name in os.environ}
        environment = {
            **passed, "HOME": str(folder), "TMPDIR": str(folder), **endpoint_variables(task), **self._environment
        }  # fmt: skip
        with tempfile.TemporaryFile() as question:  # a pipe would have to be read
            question.write(json.dumps(asdict(task)).encode())
            question.seek(0)
            return subprocess.Popen(
                filled(self._command, task),
                stdin=question,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,  # so that what it starts is ended with it
            )

    def close(self) -> None:
        for pid, key in list(self._running.items()):
            _end_session(pid, key)


def filled(command: Sequence[str], task: AgentTask) -> list[str]:
    """`command` with `{prompt}` and `{row.KEY}` replaced; braces around anything else stay."""
    fields = {"prompt": task.prompt, **{f"row.{key}": value for key, value in task.row.items()}}
    pattern = re.compile(r"\{(prompt|row\.[\w-]+)\}")
    return [pattern.sub(lambda found: str(fields.get(found[1], found[0])), argument) for argument in command]


def endpoint_variables(task: AgentTask) -> dict[str, str]:
    """The environment variables that clients of OpenAI and Anthropic read."""
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": task.api_key,
        "MEGARL_MODEL": task.model,
    }


class _LastWords:
    """Reads what a process prints, however much it is, and keeps the end of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._kept = b""
        self._reading = asyncio.ensure_future(self._read(process))

    async def _read(self, process: subprocess.Popen[bytes]) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        try:
            while chunk := await reader.read(1 << 16):
                self._kept = (self._kept + chunk)[-LAST_WORDS:]
        finally:
            transport.close()

    async def until_now(self) -> str:
        """The end of it. A child that stays may hold the output open, and is not waited for."""
        await asyncio.wait([self._reading], timeout=0.2)
        self._reading.cancel()
        return self._kept.decode(errors="replace").strip()


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for `process` alone: asyncio's own wait is also for whoever else holds its output."""
    ended, loop, handle = asyncio.Event(), asyncio.get_running_loop(), os.pidfd_open(process.pid)
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return process.wait()


def _end_agent(process: subprocess.Popen[bytes], key: str) -> None:
    _end_session(process.pid, key)
    process.wait()


def _end_session(pid: int, key: str) -> None:
    """Kill the processes of the session that `pid` began, and those that left it: they have the key in their environment."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("OPENAI_API_KEY") == key:
                process.kill()


class OtherPython(NamedTuple):
    """A Python with packages of its own, and what its environment has besides the run's."""

    program: str
    environment: Mapping[str, str]


class FunctionAgent(Agent):
    """A function of the user's, `agent(task)`, in processes of their own: a `def` in threads, an `async def` in one.

    It returns None, or the reward of its episode.
    """

    def __init__(self, path: str, processes: int, other: OtherPython | None = None) -> None:
        """`path` as `package.module:function` or `path/to/file.py:function`; `other`: the Python that runs it."""
        self.name = f"the agent {path}"
        self._processes = [_AgentProcess(path, other) for _ in range(processes)]

    async def get_ready(self) -> None:
        await asyncio.gather(*(process.get_ready() for process in self._processes))

    async def run(self, task: AgentTask) -> AgentEnd:
        process = min(self._processes, key=lambda one: len(one.waiting))
        return await process.run(task)

    def close(self) -> None:
        for process in self._processes:
            process.kill()


class _Waiting(NamedTuple):
    """The callers that wait for the answer of a process."""

    loop: asyncio.AbstractEventLoop
    answered: asyncio.Future[dict[str, Any]]
    process: FunctionProcess


class _AgentProcess:
    """One process, started when it is needed; it ends by itself when its input closes."""

    def __init__(self, path: str, other: OtherPython | None = None) -> None:
        self._path, self._other = path, other
        self._process: FunctionProcess | None = None
        self.waiting: dict[int, _Waiting] = {}
        self._numbers = count()

    async def get_ready(self) -> None:
        """Start the process, unless it runs, and wait until it has read the user's function."""
        if self._process is None or self._process.popen.poll() is not None:
            self._process = self._started()
        process = self._process
        if not await asyncio.to_thread(process.is_ready.wait, START_S):
            process.kill()
            raise EpisodeError(f"the process of the agent {self._path} did not start within {START_S:.0f} s")

    async def run(self, task: AgentTask) -> AgentEnd:
        number, process = next(self._numbers), self._process
        assert process is not None
        try:
            answer = await self._asked(process, number, {"number": number, "task": asdict(task)})
        except asyncio.CancelledError:
            await self._cancel(process, number)
            raise
        finally:
            self.waiting.pop(number, None)
        return AgentEnd(answer["reward"], answer["failed"], "with_process" in answer, why=answer["why"])

    def _asked(self, process: FunctionProcess, number: int, line: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        """Write `line`; gives the next answer about `number`, or that the process has ended."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.waiting[number] = _Waiting(loop, answered, process)
        process.write(line)
        if process.has_ended:  # nobody reads its answers any more
            self._settle(number, _died(process))
        return answered

    async def _cancel(self, process: FunctionProcess, number: int) -> None:
        """Have the function cancelled; one that goes on all the same is ended with its process, and with all that it serves."""
        _, late = await asyncio.wait([self._asked(process, number, {"cancel": number})], timeout=GRACE_S)
        if late:
            process.kill()

    def _started(self) -> FunctionProcess:
        file, other = Path(__file__).with_name("agent_process.py"), self._other or OtherPython(sys.executable, {})
        argv = [other.program, "-P", str(file)]  # -P: this folder must not become an import path
        process = FunctionProcess(argv, other.environment)
        path = sys.path if self._other is None else None
        process.write({"path": path, "megarl": str(Path(__file__).parents[3]), "function": self._path})
        threading.Thread(target=self._read, args=(process,), name="agent-process", daemon=True).start()
        return process

    def _read(self, process: FunctionProcess) -> None:
        for answer in process.answers():
            self._settle(answer["number"], answer)
        for number, waiting in list(self.waiting.items()):  # a new process may have been started since
            if waiting.process is process:
                self._settle(number, _died(process))

    def _settle(self, number: int, answer: dict[str, Any]) -> None:
        waiting = self.waiting.get(number)
        if waiting is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                waiting.loop.call_soon_threadsafe(_give, waiting.answered, answer)

    def kill(self) -> None:
        """End the process, and what it started."""
        if self._process is not None:
            self._process.kill()


def _died(process: FunctionProcess) -> dict[str, Any]:
    why = f"its process ended with {process.popen.returncode}"
    return {"reward": None, "failed": True, "with_process": True, "why": why}


def _give(answered: asyncio.Future[dict[str, Any]], answer: dict[str, Any]) -> None:
    if not answered.done():
        answered.set_result(answer)


def open_agent(
    command: Sequence[str], function: str | None, processes: int | None, environment: Mapping[str, str], passed: Sequence[str]
) -> Agent:
    """The agent that a config names.

    Raises:
        EpisodeError: the command is not there.
    """
    if function is not None:
        return FunctionAgent(function, processes or max(1, len(os.sched_getaffinity(0)) // 2))
    if shutil.which(command[0]) is None:
        raise EpisodeError(f"rollout.episode.agent.command begins with '{command[0]}', which is no program that can be found")
    return CommandAgent(command, environment, passed)


class SandboxedAgent(Agent):
    """A command line as `CommandAgent` has it; its folder, and what it may reach, are the sandbox's."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], sandboxes: CommandFolders) -> None:
        self.name = f"the agent {command[0]}"
        self._command, self._environment, self._sandboxes = list(command), dict(environment), sandboxes

    async def run(self, task: AgentTask) -> AgentEnd:
        environment = {**endpoint_variables(task), **self._environment}
        question = json.dumps(asdict(task))
        async with self._sandboxes.opened(task.row) as sandbox:
            result = await sandbox.run(filled(self._command, task), question, LONGEST_S, environment)
        if result.ended_by or result.exit_code:
            return AgentEnd(failed=True, why=f"it failed in its sandbox: {result.told()[-LAST_WORDS:]}")
        return AgentEnd()

    def close(self) -> None:
        self._sandboxes.close()
