"""Opens sandboxes and runs commands in them, each through a process that keeps its folder (`keeper.py`).

Nothing that a command prints or leaves is read as anything but text here, and no file of a sandbox is opened by the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from megarl.errors import EpisodeError
from megarl.options.sandboxes.containers import Container, found_container
from megarl.options.sandboxes.section import SandboxConfig
from megarl.rewards import sandbox as confining
from megarl.rollout.episodes.commands import CommandResult
from megarl.system.line_process import EndedError, LineProcess
from megarl.system.process_tree import end_session

START_S = 120.0
"""For a keeper to start and lay out the first files."""
KEEPER_S = 150.0
"""Given to a keeper, on top of a command's own seconds, to end it and look at the folder."""
SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$0"; else exec sh -c "$0"; fi'


class Sandbox:
    """The folder of one episode. Commands run one after the other."""

    def __init__(self, process: LineProcess, folder: str, settings: SandboxConfig, threads: ThreadPoolExecutor) -> None:
        """`process` keeps `folder`."""
        self.folder = folder
        self._process, self._settings, self._threads = process, settings, threads
        self._turn = asyncio.Lock()
        self._asking: Future[dict[str, Any]] | None = None
        """What the keeper was asked last. It goes on, and is answered, though its caller may have gone away."""
        self._session, self._is_gone = process.pid, False

    async def run(
        self,
        command: str | Sequence[str],
        stdin: str = "",
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a shell's text or a program with its arguments in the folder, for at most `timeout_s` (null: as configured).

        Raises:
            EpisodeError: the sandbox is gone, or what a command started in its container cannot be ended.
        """
        argv = ["sh", "-c", SHELL, command] if isinstance(command, str) else list(command)
        limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
        if any("\0" in part for part in argv):
            return CommandResult(127, "", "it did not start: a zero byte is in the command")
        line = json.dumps({"command": argv, "stdin": stdin, "timeout_s": limit_s, "environment": dict(environment or {})})
        async with self._turn:
            if self._asking is not None and not self._asking.done():
                await asyncio.gather(asyncio.wrap_future(self._asking), return_exceptions=True)
            self._asking = self._threads.submit(self._ask, line, limit_s)
            answer = await asyncio.wrap_future(self._asking)
        if answer.pop("is_lost"):
            raise EpisodeError("what a command started in its container (rollout.episode.sandbox) cannot be ended")
        problem = answer.pop("problem")
        if problem:
            return CommandResult(127, "", f"it did not start: {problem}")
        return CommandResult(**answer)

    def _ask(self, line: str, limit_s: float) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._process.ask(line, limit_s + KEEPER_S)
        except (EndedError, TimeoutError, AssertionError):
            self.end()
            raise EpisodeError("the process that keeps an episode's sandbox ended; was it killed for want of memory?") from None
        return answer

    async def close(self) -> None:
        """End what runs in it and remove it."""
        await asyncio.shield(asyncio.to_thread(self.end))

    def end(self) -> None:
        """The same, in the calling thread. May be called twice."""
        if self._is_gone:
            return
        self._is_gone = True
        if self._process.pid is not None and self._process.end(KEEPER_S):
            return
        assert self._session is not None
        end_session(self._session)  # its keeper was killed
        shutil.rmtree(self.folder, ignore_errors=True)


class Sandboxes:
    """The common part of a run's sandboxes. `close` ends those that are open."""

    def __init__(self, settings: SandboxConfig, container: Container | None, port: int | None = None) -> None:
        """`container` None: the kernel confines commands. `port`: of this machine, to which they may connect."""
        self.settings, self.is_container = settings, container is not None
        self.kind = container.wrap[0] if container is not None else "seccomp"
        """Confinement of commands, as `rollout.episode.sandbox.kind` calls it."""
        self._threads = ThreadPoolExecutor(settings.at_once, thread_name_prefix="sandbox")
        self._open: set[Sandbox] = set()
        path = os.pathsep.join(dict.fromkeys([f"{sys.prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]))
        self._setting: dict[str, Any] = {
            "library": str(Path(confining.__file__).parent),
            "copy_from": os.path.abspath(settings.files) if settings.files is not None else None,
            "memory_bytes": settings.memory_mb << 20,
            "disk_bytes": settings.disk_mb << 20,
            "output_bytes": settings.output_kb << 10,
            "processes": settings.processes,
            "network": settings.network,
            "readable": [os.path.abspath(folder) for folder in settings.readable],
            "port": port,
            "environment": {**({} if container is not None else {"PATH": path}), **settings.environment},
            "container": asdict(container) if container is not None else None,
            "has_own_user": container is None or container.has_own_user,
        }

    def files_of(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The further files that a row has.

        Raises:
            EpisodeError: they are no mapping of paths inside the folder to texts.
        """
        if self.settings.files_key is None:
            return {}
        files = row.get(self.settings.files_key)
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise EpisodeError(
                f"a row's '{self.settings.files_key}' (rollout.episode.sandbox.files_key) is a {type(files).__name__}; it must "
                "be an object whose keys are paths and whose values are texts"
            )
        for name in files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not PurePosixPath(name).parts:
                raise EpisodeError(f"a row has the file '{name}', which is not inside the sandbox's folder")
        return files

    async def open(self, row: Mapping[str, Any]) -> Sandbox:
        """A sandbox with the files that it begins with.

        Raises:
            EpisodeError: it cannot be made; the sentence says why.
        """
        setting = json.dumps({**self._setting, "files": self.files_of(row)})
        process = LineProcess([sys.executable, "-I", "-B", str(Path(__file__).with_name("keeper.py"))])
        starting = self._threads.submit(self._started, process, setting)
        try:
            folder = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:  # the thread goes on: what it starts must not be forgotten
            starting.add_done_callback(lambda done: done.cancelled() or done.exception() or process.end(KEEPER_S))
            raise
        sandbox = Sandbox(process, folder, self.settings, self._threads)
        self._open.add(sandbox)
        return sandbox

    @contextlib.asynccontextmanager
    async def opened(self, row: Mapping[str, Any]) -> AsyncIterator[Sandbox]:
        """A sandbox that goes with the block."""
        sandbox = await self.open(row)
        try:
            yield sandbox
        finally:
            await self.closed(sandbox)

    async def closed(self, sandbox: Sandbox) -> None:
        """Remove a sandbox."""
        self._open.discard(sandbox)
        await sandbox.close()

    def _started(self, process: LineProcess, setting: str) -> str:
        try:
            answer = process.start(setting, START_S)
        except (EndedError, TimeoutError):
            raise EpisodeError(f"the process that keeps a sandbox did not start within {START_S:g} s") from None
        if answer["problem"]:
            process.end(KEEPER_S)
            raise EpisodeError(f"rollout.episode.sandbox cannot be made: {answer['problem']}")
        return str(answer["folder"])

    async def check(self) -> None:
        """Run a command that does nothing.

        Raises:
            EpisodeError: this machine cannot hold sandboxes of this kind.
        """
        async with self.opened({self.settings.files_key: {}} if self.settings.files_key is not None else {}) as sandbox:
            result = await sandbox.run(["sh", "-c", "exit 0"])
        if result.exit_code:
            raise EpisodeError(
                f"rollout.episode.sandbox.kind is '{self.settings.kind}', but commands cannot run so on this machine: "
                f"{result.told() or 'a shell that does nothing fails'}"
            )

    def close(self) -> None:
        """End the sandboxes that are open; commands under way fail."""
        for sandbox in list(self._open):
            sandbox.end()
        self._open.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def open_sandboxes(settings: SandboxConfig, choices: list[str], port: int | None = None) -> Sandboxes:
    """The sandboxes that a config asks for, tried once, for tools or agents to work in; see `Sandboxes`.

    What `kind: auto` chose is added to `choices`.

    Raises:
        EpisodeError: this machine has none of that kind.
    """
    sandboxes = Sandboxes(settings, found_container(settings), port)
    try:
        asyncio.run(sandboxes.check())
    except BaseException:
        sandboxes.close()
        raise
    if settings.kind == "auto":
        choices.append(f"sandboxes: {sandboxes.kind} (rollout.episode.sandbox.kind is 'auto')")
    return sandboxes
