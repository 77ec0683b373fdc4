"""What a server says of its room by the client: what it holds, and which responses have ended of requests that go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from megarl.rollout.engines.capacity import UNKNOWN, EndedResponses, EngineCapacity
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.client import SglangClient

RANK = {"effective_max_running_requests_per_dp": 16}


@dataclass
class Server:
    """A server whose every answer a test decides."""

    url: str = ""
    alive: bool = True

    @property
    def headers(self) -> dict[str, str]:
        return {}

    def exit_report(self) -> str:
        return ""


def asked(answer: Callable[[web.Request], Awaitable[Any]], ask: Callable[[SglangClient], Awaitable[Any]]) -> Any:
    """What `ask` returns of a client whose server answers by `answer`."""

    async def scenario() -> Any:
        async def respond(request: web.Request) -> web.Response:
            return web.json_response(await answer(request))

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", respond)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await ask(SglangClient(Server(f"http://127.0.0.1:{runner.addresses[0][1]}")))
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("facts", "capacity"),
    [
        ({"max_total_num_tokens": 8192, "internal_states": [RANK]}, EngineCapacity(16, 8192)),
        ({"max_total_num_tokens": 8192, "internal_states": [RANK, RANK]}, EngineCapacity(32, 16384)),
        ({"max_total_num_tokens": 8192, "internal_states": [{}]}, EngineCapacity(None, 8192)),
        ({"max_total_num_tokens": None, "internal_states": [RANK]}, EngineCapacity(16, None)),
        ({"model_path": "m"}, UNKNOWN),
        ([], UNKNOWN),
    ],
)
def test_a_server_s_data_parallel_ranks_hold_what_they_say_together(facts: Any, capacity: EngineCapacity) -> None:
    async def answer(request: web.Request) -> Any:
        assert request.path == "/server_info"
        return facts

    assert asked(answer, lambda client: client.capacity()) == capacity


def test_a_response_that_ends_before_its_group_is_told_once_and_none_of_a_request_that_is_done() -> None:
    goes_on, noted = asyncio.Event(), list[str]()

    async def answer(request: web.Request) -> Any:
        body = await request.json()
        if body["sampling_params"]["max_new_tokens"]:
            if body["rid"].endswith(("2", "3")):  # the third and fourth response
                await goes_on.wait()
            return {
                "output_ids": [7],
                "meta_info": {"output_token_logprobs": [[-1.0, 7]], "finish_reason": {"type": "stop"}, "prompt_tokens": 2},
            }
        return {"meta_info": {"prompt_tokens": 2}}

    async def ask(client: SglangClient) -> list[str]:
        request = EngineRequest([[1, 2]], SamplingParams(4), n=4, keys=["g5"])
        whole = asyncio.ensure_future(client.generate(request, 0))
        told = await client.ended.take()
        while len(told) < 2:
            told += await client.ended.take()
        assert not whole.done()
        assert not client.ended._ended
        goes_on.set()
        await whole
        assert not client.ended._ended, "nobody has to be told of what is done"
        client.ended.note = noted.append  # type: ignore[method-assign]
        await client.generate(EngineRequest([[1, 2]], SamplingParams(4), keys=["g5/0/2"]), 0)
        return told

    assert asked(answer, ask) == ["g5", "g5"]
    assert noted == [], "the end of a request that has one response says it"


def test_all_that_have_ended_are_told_to_whoever_waits() -> None:
    async def scenario() -> None:
        ended = EndedResponses()
        waiting = asyncio.ensure_future(ended.take())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        for key in ("a", "b", "a"):
            ended.note(key)
        assert sorted(await waiting) == ["a", "a", "b"]
        ended.note("c")
        ended.forget(["c", "d"])
        assert not ended._ended

    asyncio.run(scenario())
