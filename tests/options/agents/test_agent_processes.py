"""Processes of agents' functions: one episode that is cancelled, or a process that ends or does not read, harms no other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from megarl.options.agents import agent_process
from megarl.options.agents.agents import AgentEnd, _AgentProcess
from megarl.options.agents.task import AgentTask

WAIT_S = 60.0
FUNCTIONS = """
import asyncio, os, time

async def waits(task):
    while not os.path.exists(task.row["until"]):
        await asyncio.sleep(0.01)
    return 1.0

async def ends(task):
    pass

async def acts(task):
    return await globals()[task.prompt](task)

STARTED = time.monotonic()

async def blocks(task):
    while not os.path.exists(task.row["until"]):
        if time.monotonic() > STARTED + 20:
            return 0.0
        time.sleep(0.01)
    return 1.0
"""


class Functions(_AgentProcess):
    """A process of `FUNCTIONS` that says when its answers have been read."""

    def __init__(self, folder: Path) -> None:
        (folder / "functions.py").write_text(FUNCTIONS)
        super().__init__(f"{folder / 'functions.py'}:acts")
        self.has_settled = threading.Event()
        self.until = folder / "until"

    def task(self, function: str, **row: Any) -> AgentTask:
        return AgentTask("http://host/v1", "key", "megarl", function, {"until": str(self.until), **row})

    def _settle(self, number: int, answer: dict[str, Any]) -> None:
        super()._settle(number, answer)
        if number >= 0:
            self.has_settled.set()


def acted(folder: Path, scenario: Callable[[Functions], Coroutine[Any, Any, None]]) -> None:
    functions = Functions(folder)

    async def run() -> None:
        await functions.get_ready()
        async with asyncio.timeout(WAIT_S):
            await scenario(functions)

    try:
        asyncio.run(run())
    finally:
        functions.kill()


async def cycles(number: int = 10) -> None:
    """Let tasks go on as far as they can."""
    for _ in range(number):
        await asyncio.sleep(0)


def test_an_episode_that_is_cancelled_as_its_function_ends_leaves_the_others_of_its_process(tmp_path: Path) -> None:
    async def scenario(functions: Functions) -> None:
        other = asyncio.create_task(functions.run(functions.task("waits")))
        one = asyncio.create_task(functions.run(functions.task("ends")))
        await cycles()
        assert functions.has_settled.wait(WAIT_S), "its answer waits for the loop, which this holds up"
        one.cancel()
        await asyncio.wait([one])
        assert one.cancelled()
        functions.until.touch()
        assert await other == AgentEnd(1.0)
        assert functions.waiting == {}

    acted(tmp_path, scenario)


def test_an_episode_that_is_cancelled_as_its_process_is_replaced_leaves_the_new_process(tmp_path: Path) -> None:
    async def scenario(functions: Functions) -> None:
        one = asyncio.create_task(functions.run(functions.task("waits")))
        await cycles()
        assert functions._process is not None
        os.kill(functions._process.popen.pid, signal.SIGKILL)
        assert functions.has_settled.wait(WAIT_S)
        functions._process = functions._started()
        one.cancel()
        await asyncio.wait([one])
        assert one.cancelled()
        functions.until.touch()
        assert await functions.run(functions.task("waits")) == AgentEnd(1.0)

    acted(tmp_path, scenario)


def test_an_episode_that_begins_as_its_process_ends_hears_of_it(tmp_path: Path) -> None:
    async def scenario(functions: Functions) -> None:
        assert functions._process is not None
        os.kill(functions._process.popen.pid, signal.SIGKILL)
        for reading in [thread for thread in threading.enumerate() if thread.name == "agent-process"]:
            reading.join(WAIT_S)
        end = await functions.run(functions.task("ends"))
        assert end.with_process
        assert end.why == "its process ended with -9"

    acted(tmp_path, scenario)


def test_a_process_that_does_not_read_holds_up_nobody_who_gives_it_tasks(tmp_path: Path) -> None:
    """As where a function waits, by a client that is not asyncio's, for a turn that the same loop would sample."""

    async def scenario(functions: Functions) -> None:
        row = {"text": "x" * (32 << 10)}
        running = [asyncio.create_task(functions.run(functions.task("blocks", **row))) for _ in range(8)]
        await cycles()
        functions.until.touch()
        assert await asyncio.gather(*running) == [AgentEnd(1.0)] * 8

    acted(tmp_path, scenario)


def test_the_threads_of_a_process_end_with_it(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    functions = Functions(tmp_path)
    asyncio.run(functions.get_ready())
    threads = {*threading.enumerate()} - before
    functions.kill()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(thread.name for thread in threads) == ["agent-input", "agent-output", "agent-process"]
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def program(tmp_path: Path) -> Any:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    setting = {"path": sys.path, "megarl": None, "function": f"{tmp_path / 'functions.py'}:acts"}
    argv = [sys.executable, "-P", agent_process.__file__]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        written(process, setting)
        yield process
        process.kill()


def written(process: Any, *lines: dict[str, Any]) -> None:
    """Write `lines` so that they are read together."""
    os.write(process.stdin.fileno(), b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def test_every_cancel_is_answered(program: Any) -> None:
    assert json.loads(program.stdout.readline()) == {"number": -1}
    task = {"base_url": "", "api_key": "", "model": "", "prompt": "ends", "row": {}}
    written(program, {"number": 0, "task": task}, {"cancel": 0}, {"cancel": 7}, {"number": 1, "task": task})
    answers: dict[int, Any] = {}
    while 1 not in answers:
        answer = json.loads(program.stdout.readline())
        answers[answer.pop("number")] = answer
    ended = {"reward": None, "failed": True, "why": "it was ended"}
    assert answers == {0: ended, 7: ended, 1: {"reward": None, "failed": False, "why": "it ended without an error"}}
