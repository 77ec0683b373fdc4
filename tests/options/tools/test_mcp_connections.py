"""Calls that share an MCP server harm each other's connection in no order; the servers here are stand-ins without a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.options.tools import mcp_servers
from megarl.options.tools.answers import ToolAnswer
from megarl.options.tools.mcp_servers import McpTools
from megarl.options.tools.section import McpServerConfig

WAIT_S = 60.0
TOOL = SimpleNamespace(name="acts", description="Act.", input_schema={"type": "object", "properties": {}})


class Client:
    """The client of a stand-in. What it is asked waits in `asked` and `signs` until the test settles it."""

    def __init__(self) -> None:
        self.session = SimpleNamespace(list_tools=self._sign_of_life)
        self.asked: list[asyncio.Future[str]] = []
        self.signs: list[asyncio.Future[None]] = []

    async def list_tools(self, cursor: str | None) -> Any:
        return SimpleNamespace(tools=[TOOL], next_cursor=None)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        self.asked.append(asyncio.get_running_loop().create_future())
        text = await self.asked[-1]
        return SimpleNamespace(content=[SimpleNamespace(type="text", text=text)], is_error=False, structured_content=None)

    async def _sign_of_life(self) -> None:
        self.signs.append(asyncio.get_running_loop().create_future())
        await self.signs[-1]


class Servers:
    """The stand-ins that were started, and how many have ended. The test holds up the start and the end of them."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.ended = 0
        self.may_start, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_end.set()

    @contextlib.asynccontextmanager
    async def entered(self, settings: McpServerConfig) -> AsyncIterator[Client]:
        self.clients.append(Client())
        client = self.clients[-1]
        try:
            await self.may_start.wait()
            yield client
            await self.may_end.wait()
        finally:
            self.ended += 1


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    found = Servers()
    monkeypatch.setattr(mcp_servers, "_entered", found.entered)
    monkeypatch.setattr(mcp_servers, "SIGN_OF_LIFE_S", WAIT_S)
    return found


@pytest.fixture
def tools(servers: Servers) -> Iterator[McpTools]:
    found = McpTools("test", McpServerConfig(command=("no-such-program",)), WAIT_S, None)
    yield found
    found.close()


def done(tools: McpTools, scenario: Callable[[Callable[[], asyncio.Task[ToolAnswer]]], Coroutine[Any, Any, None]]) -> None:
    """Run `scenario`, which begins calls, in the loop of the connections."""

    def begin() -> asyncio.Task[ToolAnswer]:
        return asyncio.ensure_future(tools._call(tools._shared, "acts", {}))

    asyncio.run_coroutine_threadsafe(asyncio.wait_for(scenario(begin), WAIT_S), tools._loop).result(WAIT_S)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("failure", [TimeoutError(), RuntimeError()])
def test_a_call_to_a_server_that_was_replaced_leaves_the_new_one(servers: Servers, tools: McpTools, failure: Exception) -> None:
    async def scenario(begin: Callable[[], asyncio.Task[ToolAnswer]]) -> None:
        [old] = servers.clients
        first, second = begin(), begin()
        await until(lambda: len(old.asked) == 2)
        for asked in old.asked:
            asked.set_exception(failure)
        await until(lambda: len(old.signs) == 2)
        old.signs[0].set_exception(ConnectionError())
        assert (await first).failure is not None
        third = begin()
        await until(lambda: len(servers.clients) == 2 and bool(servers.clients[1].asked))
        old.signs[1].set_exception(ConnectionError())
        assert (await second).failure is not None
        servers.clients[1].asked[0].set_result("the new one's")
        assert (await third).told.text == "the new one's"
        assert len(servers.clients) == 2
        assert servers.ended == 1

    done(tools, scenario)


def test_a_server_that_starts_while_the_one_before_it_still_ends_is_closed_with_the_run(
    servers: Servers, tools: McpTools
) -> None:
    async def scenario(begin: Callable[[], asyncio.Task[ToolAnswer]]) -> None:
        [old] = servers.clients
        servers.may_end.clear()
        first = begin()
        await until(lambda: bool(old.asked))
        old.asked[0].set_exception(TimeoutError())
        await until(lambda: bool(old.signs))
        old.signs[0].set_exception(ConnectionError())
        second = begin()
        await until(lambda: len(servers.clients) == 2 and bool(servers.clients[1].asked))
        assert servers.ended == 0
        servers.may_end.set()
        await first
        servers.clients[1].asked[0].set_result("the new one's")
        assert (await second).told.text == "the new one's"

    done(tools, scenario)
    tools.close()
    assert servers.ended == 2


def test_a_call_that_is_cancelled_while_the_server_starts_leaves_it_to_the_next_one(servers: Servers, tools: McpTools) -> None:
    async def scenario(begin: Callable[[], asyncio.Task[ToolAnswer]]) -> None:
        await tools._shared.close()
        servers.may_start.clear()
        first = begin()
        await until(lambda: len(servers.clients) == 2)
        first.cancel()
        await asyncio.wait([first])
        second = begin()
        servers.may_start.set()
        await until(lambda: any(client.asked for client in servers.clients))
        servers.clients[-1].asked[0].set_result("done")
        assert (await second).told.text == "done"
        assert len(servers.clients) == 2

    done(tools, scenario)
    tools.close()
    assert servers.ended == 2


def test_calls_that_wait_for_one_start_hear_of_its_failure_together(
    servers: Servers, tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(begin: Callable[[], asyncio.Task[ToolAnswer]]) -> None:
        await tools._shared.close()
        servers.may_start.clear()
        monkeypatch.setattr(mcp_servers, "START_S", 0.05)
        answers = await asyncio.gather(*(begin() for _ in range(3)))
        assert len(servers.clients) == 2
        assert {answer.failure for answer in answers} == {"tool_errors"}
        assert all("cannot be reached: it did not answer within 0.05 s" in answer.told.text for answer in answers)

    monkeypatch.setattr(mcp_servers, "END_S", 0.2)
    done(tools, scenario)
