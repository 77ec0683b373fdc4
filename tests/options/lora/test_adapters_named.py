"""Requests name the adapters of their answer; one that an update overtakes is sent again under the new name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from megarl.errors import EngineError
from megarl.options.lora.sglang_client import AdapterClient


async def asked(serves: str, names: list[str | None]) -> tuple[Any, list[Any]]:
    """The answer of a server that has the adapters `serves` to a client that finds these names in turn, and what it saw."""
    seen: list[Any] = []

    async def generate(request: web.Request) -> web.Response:
        seen.append((await request.json()).get("lora_path"))
        if seen[-1] != serves:
            return web.json_response({"error": {"message": "other adapters"}}, status=400)
        return web.json_response({"text": "well"})

    application = web.Application()
    application.router.add_post("/generate", generate)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    server = SimpleNamespace(url=f"http://{host}:{port}", headers={}, alive=True, exit_report=lambda: "")
    left = iter(names)
    client = AdapterClient(server, lambda: next(left))
    try:
        async with client._session(5.0) as session:
            return await client._ask(session, {}), seen
    finally:
        await runner.cleanup()


def test_a_request_that_an_update_overtook_is_sent_again() -> None:
    answer, seen = asyncio.run(asked("version-2", ["version-1", "version-2", "version-2"]))
    assert (answer, seen) == ({"text": "well"}, ["version-1", "version-2"])


def test_a_request_that_is_refused_under_the_name_that_holds_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"answered 400: .*other adapters"):
        asyncio.run(asked("version-2", ["version-3", "version-3"]))
