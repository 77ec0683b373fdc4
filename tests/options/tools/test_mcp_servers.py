"""Tools of MCP servers: real servers of the official package, over stdio and HTTP, that answer, fail, hang and end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.errors import EpisodeError
from megarl.options.tools.answers import ToolAnswer
from megarl.options.tools.mcp_servers import McpTools
from megarl.options.tools.section import McpServerConfig
from tests.data.chat_tokenizers import CHATML, byte_tokenizer, ids_of
from tests.rollout.episode_parts import PROMPT, Script, Settings, opened

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow
PROGRAM = str(Path(__file__).with_name("mcp_server.py"))
STDIO = McpServerConfig(command=(sys.executable, PROGRAM, "stdio"), environment={"GIVEN": "yes"})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server that speaks HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = int(free.getsockname()[1])
    process = subprocess.Popen([sys.executable, PROGRAM, str(number)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", number), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield number
    process.kill()
    process.wait()


@pytest.fixture(params=["stdio", "http"])
def tools(request: pytest.FixtureRequest) -> Iterator[McpTools]:
    settings = STDIO
    if request.param == "http":
        settings = McpServerConfig(url=f"http://127.0.0.1:{request.getfixturevalue('port')}/mcp")
    found = McpTools("test", settings, 3, None)
    yield found
    found.close()


def called(tools: McpTools, *calls: tuple[str, dict[str, Any]], at_once: bool = False) -> list[ToolAnswer]:
    async def scenario() -> list[ToolAnswer]:
        async with tools.begun({}) as call:
            if at_once:
                return list(await asyncio.gather(*(call(*one) for one in calls)))
            return [await call(*one) for one in calls]

    return asyncio.run(scenario())


def servers() -> set[int]:
    """Processes of this one that run the tests' server over stdio."""
    found = psutil.Process().children(recursive=True)
    return {p.pid for p in found if p.status() != psutil.STATUS_ZOMBIE and p.cmdline()[-2:] == [PROGRAM, "stdio"]}


def test_schemas_reach_the_chat_template_as_those_of_functions_do(tools: McpTools) -> None:
    schemas = {schema["function"]["name"]: schema for schema in tools.schemas}
    assert sorted(schemas) == ["add", "count", "dies", "environment", "fails", "hangs", "picture", "sleeps"]
    function = schemas["add"]["function"]
    assert schemas["add"]["type"] == "function"
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["required"] == ["a", "b"]
    assert {name: one["type"] for name, one in function["parameters"]["properties"].items()} == {"a": "integer", "b": "integer"}


def test_answers_errors_and_late_calls(tools: McpTools) -> None:
    answers = called(
        tools,
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": "one", "b": 2}),
        ("fails", {}),
        ("sleeps", {}),
        ("picture", {}),
        ("add", {"a": 3, "b": 4}),
    )
    assert [answer.failure for answer in answers] == [None, "tool_errors", "tool_errors", "tool_timeouts", "tool_errors", None]
    texts = [answer.told.text for answer in answers]
    assert (texts[0], texts[5]) == ("3", "7")
    assert "integer" in texts[1]
    assert "no such thing" in texts[2]
    assert texts[3] == "error: sleeps did not answer within 3 s"
    assert "the model takes none" in texts[4]


def test_calls_of_many_episodes_run_at_once(tools: McpTools) -> None:
    started = time.monotonic()
    answers = called(tools, *([("sleeps", {})] * 4), *(("add", {"a": n, "b": n}) for n in range(20)), at_once=True)
    assert time.monotonic() - started < 12
    assert [answer.told.text for answer in answers[4:]] == [str(2 * n) for n in range(20)]


def test_a_server_that_dies_is_one_answer_and_is_started_again() -> None:
    tools = McpTools("test", STDIO, 20, None)
    try:
        first, died, after = called(tools, ("count", {}), ("dies", {}), ("count", {}))
        assert died.failure == "tool_errors"
        assert died.told.text == "error: the MCP server of dies ended; it is started again for the next call"
        assert first.told.text.startswith("1 of ")
        assert after.told.text.startswith("1 of ")
        assert first.told.text != after.told.text
        [pid] = servers()
        os.kill(pid, signal.SIGKILL)
        answers = [answer.told.text for answer in called(tools, ("count", {}), ("count", {}))]
        assert answers[-1].split()[0] in ("1", "2")
    finally:
        tools.close()
    assert servers() == set()


def test_a_server_that_hangs_is_one_late_answer_and_is_started_again() -> None:
    tools = McpTools("test", STDIO, 2, None)
    try:
        first, hung, after = called(tools, ("count", {}), ("hangs", {}), ("count", {}))
        assert hung == ToolAnswer.whole("error: hangs did not answer within 2 s", "tool_timeouts")
        assert after.told.text.startswith("1 of ")
        assert after.told.text != first.told.text
    finally:
        tools.close()
    assert servers() == set()


def test_servers_are_shared_or_one_for_each_episode() -> None:
    for per_episode, counts in ((False, ["1", "2"]), (True, ["1", "1"])):
        tools = McpTools("test", STDIO.model_copy(update={"per_episode": per_episode}), 20, None)
        try:
            assert [called(tools, ("count", {}))[0].told.text.split()[0] for _ in range(2)] == counts
            assert len(servers()) == (not per_episode)
        finally:
            tools.close()
        assert servers() == set()


def test_a_server_gets_what_it_needs_of_the_environment_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("PASSED", "p")
    tools = McpTools("test", STDIO.model_copy(update={"pass_environment": ("PASSED",)}), 20, None)
    try:
        answers = called(tools, *(("environment", {"name": name}) for name in ("SECRET", "PASSED", "GIVEN")))
        assert [answer.told.text for answer in answers] == ["not there", "p", "yes"]
    finally:
        tools.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (McpServerConfig(command=("/no/such/program",)), r"the MCP server 'test' \(rollout.episode.mcp\) does not start: "),
        (McpServerConfig(command=("false",)), r"the MCP server 'test' \(rollout.episode.mcp\) does not start: "),
        (McpServerConfig(url="http://127.0.0.1:9/mcp"), r"the MCP server 'test' \(rollout.episode.mcp\) does not start: "),
        (
            STDIO.model_copy(update={"tools": ("ad",)}),
            "rollout.episode.mcp.test.tools has 'ad', which the server does not have; it",
        ),
    ],
)
def test_a_server_that_is_not_there_is_told_at_the_start(settings: McpServerConfig, sentence: str) -> None:
    with pytest.raises(EpisodeError, match=sentence):
        McpTools("test", settings, 5, None)
    assert servers() == set()


def test_an_ended_run_leaves_no_server() -> None:
    program = (
        "import sys, time\nfrom megarl.options.tools.section import McpServerConfig\n"
        "from megarl.options.tools.mcp_servers import McpTools\n"
        f"tools = McpTools('test', McpServerConfig(command=(sys.executable, {PROGRAM!r}, 'stdio')), 5, None)\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"ready\n"
    found = [psutil.Process(pid) for pid in servers()]
    assert len(found) == 1
    driver.kill()
    driver.wait()
    _, left = psutil.wait_procs(found, timeout=10)
    assert left == []


def test_a_chat_calls_functions_and_servers_by_their_names() -> None:
    tokenizer = byte_tokenizer(CHATML)
    settings = Settings(
        tools=["tests.rollout.episode_parts:fails", "mcp:sums"], mcp={"sums": STDIO.model_copy(update={"tools": ("add",)})}
    )
    episode, context = opened(tokenizer, settings)
    try:
        assert [schema["function"]["name"] for schema in context.tool_schemas] == ["fails", "add"]
        call = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'
        script = Script([(ids_of(call, "<|end|>"), "stop"), (ids_of("42", "<|end|>"), "stop")])
        sample = asyncio.run(episode(PROMPT, 0, script, context))
        assert not isinstance(sample, list)
        assert [(turn["role"], turn["content"]) for turn in sample.turns] == [
            ("assistant", call),
            ("tool", "42"),
            ("assistant", "42"),
        ]
        assert context.take_counts() == {"turns": 2, "tool_calls": 1}
    finally:
        context.close()


def test_two_tools_of_one_name_are_refused() -> None:
    settings = Settings(tools=["tests.rollout.episode_parts:add", "mcp:sums"], mcp={"sums": STDIO})
    with pytest.raises(EpisodeError, match=r"rollout.episode.tools has two tools called 'add'; their names must differ"):
        opened(byte_tokenizer(CHATML), settings)
    assert servers() == set()
