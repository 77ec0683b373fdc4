"""Commands of one sandbox run one after the other, and what was begun is seen to its end, also where its caller goes away."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, cast

import pytest

from megarl.options.sandboxes import sandbox as sandbox_module
from megarl.options.sandboxes.sandbox import Sandbox, Sandboxes
from megarl.options.sandboxes.section import SandboxConfig
from megarl.system.line_process import LineProcess

ENDED = {"is_lost": False, "problem": "", "exit_code": 0, "stderr": "", "ended_by": "", "is_cut": False}


class Keeper:
    """A process that answers commands with their own text, each when it is told to; whoever reads next gets the next answer."""

    pid = 1

    def __init__(self) -> None:
        self.asked: SimpleQueue[str] = SimpleQueue()
        self._answers: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def ask(self, line: str, timeout_s: float) -> dict[str, Any]:
        self.asked.put(json.loads(line)["command"][-1])
        return self._answers.get(timeout=30)

    def answer(self, command: str) -> None:
        self._answers.put({**ENDED, "stdout": command})


class Threads(ThreadPoolExecutor):
    """Threads that count what they are given."""

    given = 0

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given += 1
        return super().submit(work, *args, **kwargs)


def sandbox_of(keeper: Keeper, threads: ThreadPoolExecutor) -> Sandbox:
    return Sandbox(cast(LineProcess, keeper), "/no/such/folder", SandboxConfig(kind="seccomp"), threads)


async def cycles(number: int = 10) -> None:
    """Let tasks go on as far as they can."""
    for _ in range(number):
        await asyncio.sleep(0)


def test_a_command_waits_for_the_one_before_it_whose_caller_went_away() -> None:
    keeper, threads = Keeper(), Threads(2)

    async def scenario() -> str:
        sandbox = sandbox_of(keeper, threads)
        first = asyncio.create_task(sandbox.run("first"))
        assert await asyncio.to_thread(keeper.asked.get, timeout=30) == "first"
        first.cancel()
        waits_in_vain, second = (asyncio.create_task(sandbox.run(name)) for name in ("waits in vain", "second"))
        await cycles()
        waits_in_vain.cancel()
        await cycles()
        given = threads.given
        keeper.answer("first")
        keeper.answer("second")
        result = await second
        assert given == 1, "the keeper still works on the first"
        return result.stdout

    assert asyncio.run(scenario()) == "second"
    assert keeper.asked.get() == "second"
    assert keeper.asked.empty()
    threads.shutdown()


def test_a_command_whose_caller_goes_away_before_a_thread_is_free_is_not_run() -> None:
    keeper, threads, is_free = Keeper(), ThreadPoolExecutor(1), threading.Event()

    async def scenario() -> str:
        sandbox = sandbox_of(keeper, threads)
        threads.submit(is_free.wait, 30)
        first = asyncio.create_task(sandbox.run("first"))
        await cycles()
        first.cancel()
        second = asyncio.create_task(sandbox.run("second"))
        await cycles()
        is_free.set()
        keeper.answer("second")
        return (await second).stdout

    assert asyncio.run(scenario()) == "second"
    assert keeper.asked.get() == "second"
    assert keeper.asked.empty()
    threads.shutdown()


def test_a_sandbox_whose_caller_goes_away_while_it_starts_is_ended_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, has_ended = threading.Event(), threading.Event(), threading.Event()
    ended_in = []

    class Starting:
        def start(self, setting: str, timeout_s: float) -> dict[str, Any]:
            begun.set()
            goes_on.wait(30)
            return {"problem": "", "folder": "/no/such/folder"}

        def end(self, timeout_s: float) -> bool:
            ended_in.append(threading.current_thread())
            has_ended.set()
            return True

    monkeypatch.setattr(sandbox_module, "LineProcess", lambda argv: Starting())

    async def scenario() -> None:
        sandboxes = Sandboxes(SandboxConfig(kind="seccomp"), None)
        opening = asyncio.create_task(sandboxes.open({}))
        await asyncio.to_thread(begun.wait, 30)
        opening.cancel()
        await asyncio.wait([opening])
        goes_on.set()
        assert await asyncio.to_thread(has_ended.wait, 30)
        sandboxes.close()

    asyncio.run(scenario())
    assert ended_in[0] is not threading.main_thread(), "the rollouts would stand still meanwhile"
