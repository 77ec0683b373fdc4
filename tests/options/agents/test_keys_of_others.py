"""An episode reaches itself alone by the endpoint of agents: none reads, replays, rewards or ends another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from megarl.options.agents.messages import RequestError
from megarl.options.agents.server import SessionServer, read_command
from megarl.options.agents.session import AgentSession, SessionLimits
from megarl.rollout.episodes.commands import CommandResult
from tests.options.agents.test_sessions import Recorder, session

LIMITS = SessionLimits(turns=4, context_tokens=2000, response_tokens=2000)
HELLO = [{"role": "user", "content": "hello"}]
SECRET = "the other's words"
Post = Callable[..., Awaitable[tuple[int, str]]]


class Folder:
    """A sandbox that tells its owner."""

    def __init__(self, owner: str) -> None:
        self.owner, self.commands = owner, list[Any]()

    async def run(self, command: Any, *more: Any) -> CommandResult:
        self.commands.append(command)
        return CommandResult(0, self.owner, "")


class Two:
    """An episode that attacks and one that is there beside it, at one endpoint."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self.client = client
        self.server = SessionServer(("megarl",))
        self.sampled = Recorder(1)
        self.sampled.next_text = SECRET
        self.mine, self.other = session(Recorder(), LIMITS), session(self.sampled, LIMITS)
        self.folder = Folder("the other's folder")
        self.key, self.other_key = self.server.open(self.mine), self.server.open(self.other, self.folder)  # type: ignore[arg-type]

    async def ask(
        self, path: str, body: Any = None, *, head: dict[str, str] | None = None, method: str = "POST"
    ) -> tuple[int, str]:
        """The answer to a request that has the attacker's key, or another head."""
        head = {"Authorization": f"Bearer {self.key}"} if head is None else head
        text = body if isinstance(body, str) else json.dumps(body)
        async with self.client.request(method, f"{self.server.url}{path}", data=text, headers=head) as answer:
            return answer.status, await answer.text()

    async def by_the_other(self, path: str, body: Any) -> tuple[int, str]:
        return await self.ask(path, body, head={"Authorization": f"Bearer {self.other_key}"})


CHAT, RESPONSES, REWARD, RUN = "/v1/chat/completions", "/v1/responses", "/v1/reward", "/v1/sandbox/run"
LIST = "/v1/models"


def _chat(**more: Any) -> dict[str, Any]:
    return {"model": "megarl", "messages": HELLO, **more}


HEADS: dict[str, Callable[[Two], dict[str, str]]] = {
    "no key": lambda two: {},
    "an empty key": lambda two: {"Authorization": "Bearer "},
    "the beginning of a key": lambda two: {"Authorization": f"Bearer {two.other_key[:-1]}"},
    "a key and more": lambda two: {"Authorization": f"Bearer {two.other_key}x"},
    "a key in small letters": lambda two: {"Authorization": f"Bearer {two.other_key.lower()}"},
    "a key in another scheme": lambda two: {"Authorization": f"Basic {two.other_key}"},
    "a key behind the word twice": lambda two: {"Authorization": f"Bearer Bearer {two.other_key}"},
    "two keys in one head": lambda two: {"Authorization": f"Bearer {two.key},{two.other_key}"},
    "what all keys begin with": lambda two: {"x-api-key": "megarl-"},
    "a pattern": lambda two: {"x-api-key": "megarl-*"},
    "a key in a cookie": lambda two: {"Cookie": f"api_key={two.other_key}"},
    "a key in a head of a proxy": lambda two: {"Proxy-Authorization": f"Bearer {two.other_key}"},
}


def _run(scenario: Callable[[Two], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with aiohttp.ClientSession() as client:
            two = Two(client)
            try:
                await scenario(two)
                # the other one goes on as if nobody had been there
                two.sampled.next_text = "fine"
                status, said = await two.by_the_other(CHAT, _chat())
                assert (status, json.loads(said)["choices"][0]["message"]["content"]) == (200, "fine")
                assert two.other.reward is None
                assert two.other.counts["floods"] == 0
            finally:
                await asyncio.to_thread(two.server.close)

    asyncio.run(all_of_it())


@pytest.mark.parametrize("name", HEADS)
def test_what_is_no_key_of_an_open_episode_opens_none(name: str) -> None:
    async def scenario(two: Two) -> None:
        for path, body in ((CHAT, _chat()), (REWARD, {"reward": 1}), (RUN, {"command": "ls"})):
            status, said = await two.ask(path, body, head=HEADS[name](two))
            assert status == 401
            assert "no episode that is open" in said
        assert two.sampled.asked == []
        assert two.folder.commands == []

    _run(scenario)


OWN_KEY: dict[str, tuple[str, Callable[[Two], dict[str, Any]]]] = {
    "the other's key in the body": (CHAT, lambda two: _chat(api_key=two.other_key)),
    "the other's key as the user": (CHAT, lambda two: _chat(user=two.other_key, metadata={"session": two.other_key})),
    "the other's key in the address": (f"{CHAT}?api_key={{other}}", lambda two: _chat()),
    "the other's history said again": (
        CHAT,
        lambda two: _chat(messages=[*HELLO, {"role": "assistant", "content": SECRET}, *HELLO]),
    ),
    "a request that was asked before": (CHAT, lambda two: _chat()),
    "a response of the other": (
        RESPONSES,
        lambda two: {"model": "megarl", "input": "x", "previous_response_id": _response_of(two)},
    ),
    "a response of no kind": (RESPONSES, lambda two: {"model": "megarl", "input": "x", "previous_response_id": [1]}),
    "a response that is an object": (
        RESPONSES,
        lambda two: {"model": "megarl", "input": "x", "previous_response_id": {"a": 1}},
    ),
    "a conversation of the other": (
        RESPONSES,
        lambda two: {"model": "megarl", "input": "x", "conversation": _response_of(two)},
    ),
    "an item of the other": (
        RESPONSES,
        lambda two: {"model": "megarl", "input": [{"type": "item_reference", "id": _response_of(two)}]},
    ),
    "the other's sandbox": (RUN, lambda two: {"command": "ls", "key": two.other_key}),
    "a reward for the other": (REWARD, lambda two: {"reward": 1, "api_key": two.other_key, "episode": two.other_key}),
    "a reward that is no number": (REWARD, lambda two: {"reward": float("nan")}),
    "a reward beyond all numbers": (REWARD, lambda two: {"reward": 10**400}),
    "a reward that is a truth": (REWARD, lambda two: {"reward": True}),
    "a reward that is a text": (REWARD, lambda two: {"reward": "1"}),
    "a model with a path": ("/v1/models/..%2F..%2Freward", lambda two: {"reward": 1}),
    "an address above": ("/v1/models/../reward/../sandbox/run", lambda two: {"command": "ls"}),
    "an address that is not there": ("/v1/sessions", lambda two: {}),
}


def _response_of(two: Two) -> str:
    return next(iter(two.other.conversations))


@pytest.mark.parametrize("name", OWN_KEY)
def test_an_episode_reads_and_changes_nothing_of_another(name: str) -> None:
    path, body = OWN_KEY[name]

    async def scenario(two: Two) -> None:
        status, said = await two.by_the_other(RESPONSES, {"model": "megarl", "input": "my question"})
        assert (status, SECRET in said) == (200, True)
        asked = len(two.sampled.asked)
        retry = {"Authorization": f"Bearer {two.key}", "x-stainless-retry-count": "1", "x-api-key": two.other_key}
        given = json.dumps(body(two))
        status, said = await two.ask(path.replace("{other}", two.other_key), given, head=retry)
        assert status < 500
        assert SECRET not in said.replace("the other's history said again", "")
        assert (len(two.sampled.asked), two.folder.commands) == (asked, [])

    _run(scenario)


async def _floods(two: Two) -> None:
    answers = [await two.ask(CHAT, _chat(messages=[{"role": "user", "content": f"{n}"}])) for n in range(50)]
    assert {status for status, _ in answers} == {200, 400}


async def _goes_away(two: Two) -> None:
    for _ in range(20):
        task = asyncio.create_task(two.ask(CHAT, _chat()))
        await asyncio.sleep(0)
        task.cancel()


async def _sends_too_much(two: Two) -> None:
    assert (await two.ask(CHAT, "x" * (65 << 20)))[0] in (400, 413)
    assert (await two.ask(CHAT, "[" * 1_000_000))[0] == 400


async def _opens_many(two: Two) -> None:
    streams = [await asyncio.open_connection("127.0.0.1", two.server.port) for _ in range(100)]
    for _, writer in streams:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n")
    await asyncio.sleep(0.1)
    for _, writer in streams:
        writer.close()


async def _comes_late(two: Two) -> None:
    mine = two.mine
    two.server.end(two.key)
    for path, body in ((CHAT, _chat()), (REWARD, {"reward": 1})):
        assert (await two.ask(path, body))[0] == 401
    await asyncio.sleep(0)
    assert mine.reward is None


async def _ends_while_it_asks(two: Two) -> None:
    never = asyncio.Event()

    async def waits(*of: Any) -> Any:
        await never.wait()

    slow: AgentSession = session(waits, LIMITS)
    key = two.server.open(slow)
    asking = asyncio.create_task(two.ask(CHAT, _chat(), head={"x-api-key": key}))
    while not slow._pending:
        await asyncio.sleep(0.01)
    two.server.end(key)
    assert (await asking)[0] == 410


async def _tells_the_methods(two: Two) -> None:
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "TRACE"):
        assert (await two.ask(CHAT, _chat(), method=method))[0] in (404, 405)


ENDS = [_floods, _goes_away, _sends_too_much, _opens_many, _comes_late, _ends_while_it_asks, _tells_the_methods]


@pytest.mark.parametrize("attack", ENDS)
def test_an_episode_does_not_end_another(attack: Callable[[Two], Awaitable[None]]) -> None:
    _run(attack)


@pytest.mark.parametrize("timeout_s", [10**400, 1e300, 10**9])
def test_a_command_is_not_asked_for_longer_than_a_day(timeout_s: float) -> None:
    with pytest.raises(RequestError, match=r"timeout_s is .*; it must be a number above 0 and at most 86400, or left out"):
        read_command({"command": "ls", "timeout_s": timeout_s})
