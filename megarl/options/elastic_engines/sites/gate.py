"""The HTTP server of a run at which engines of other sites join, fetch orders and weights, and answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from megarl.config import Config
from megarl.errors import ConfigError, MegarlError
from megarl.options.elastic_engines.section import SitesConfig
from megarl.options.elastic_engines.sites.far_engine import FarEngine
from megarl.options.elastic_engines.sites.model_facts import refusal
from megarl.options.elastic_engines.sites.weight_store import WeightStore
from megarl.options.elastic_engines.sites.wire import (
    BUSY,
    LONGEST_POLL_S,
    Joined,
    Joining,
    Leaving,
    Orders,
    Poll,
    SiteAnswer,
    SiteFacts,
)
from megarl.system.atomic_files import write_text_atomically
from megarl.system.bearer_tokens import SHORTEST_TOKEN, read_token
from megarl.system.http_server import JSON, Admission, ServerThread, application, json_answer, listen, read_json

FIELD = "rollout.sites"
TOKEN_VARIABLE = "MEGARL_SITES_TOKEN"
FOLDER, TOKEN, ADDRESS = "sites", "token", "address.json"
"""In the run's folder: the token, and where the run listens; both for the owner alone."""
ADMITTED_S = 30.0
SMALL_BYTES = 64 << 10
"""Of the body of a request that is no answer."""


class Members(Protocol):
    """The engines that have joined, as the server needs them."""

    life: str
    store: WeightStore

    def facts(self) -> SiteFacts:
        """Facts that a site is told before it joins."""
        ...

    def ask_to_join(self, engine: FarEngine) -> None:
        """Have it be given a number, or not: `FarEngine.admitted`."""
        ...

    def of(self, key: str) -> FarEngine | None:
        """The engine with this key; None: there is none (any more)."""
        ...

    def refused(self, key: str) -> str | None:
        """Why the engine that had this key is not to come again; None: it may."""
        ...


class Gate:
    """The server, from here until `close`."""

    def __init__(
        self, members: Members, settings: SitesConfig, token: str, most_bytes: int, say: Callable[[str], None]
    ) -> None:
        """`most_bytes`: of an answer.

        Raises:
            ConfigError: it cannot listen there.
        """
        self._members, self._most = members, max(most_bytes, SMALL_BYTES)
        routes = [
            Route("/site", self._facts, methods=["GET"]),
            Route("/join", self._join, methods=["POST"]),
            Route("/orders", self._orders, methods=["POST"]),
            Route("/answer", self._answer, methods=["POST"]),
            Route("/leave", self._leave, methods=["POST"]),
            Route("/weights/{version:int}/{part}", self._weights, methods=["GET"]),
        ]
        app = Admission(application(routes), token=token, is_open=False, most_bytes=self._most)
        try:
            listening = listen(settings.host, settings.port)
        except (OSError, OverflowError) as error:
            at = f"{settings.host}:{settings.port}"
            why = f"which cannot be listened on: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(f"{FIELD} is {at}, {why}; choose another port, or 0 for a free one") from None
        self._server = ServerThread(app, listening, "sites", lambda error: say(f"no further site can join: {error!r:.200}"))
        self.port = self._server.port

    def close(self) -> None:
        """End it."""
        self._server.close()

    async def _facts(self, request: Request) -> Response:
        return _answer(self._members.facts())

    async def _join(self, request: Request) -> Response:
        joining: Joining = await read_json(request, Joining, SMALL_BYTES)
        facts = self._members.facts()
        if (why := refusal(joining.megarl, joining.model, facts)) is not None:
            return json_answer({"error": why}, 409)
        engine, loop, changed = FarEngine(joining), asyncio.get_running_loop(), asyncio.Event()
        engine.on_orders(lambda: _wake(loop, changed))
        engine.changed = changed
        self._members.ask_to_join(engine)
        try:
            async with asyncio.timeout(ADMITTED_S):
                number = await asyncio.wrap_future(engine.admitted)
        except MegarlError as error:
            return json_answer({"error": str(error)}, 409)
        except TimeoutError:
            return json_answer({"error": "the run is busy; try again"}, BUSY)
        return _answer(Joined(number, engine.key, self._members.life))

    async def _orders(self, request: Request) -> Response:
        poll: Poll = await read_json(request, Poll, SMALL_BYTES)
        engine = self._of(poll.key)
        changed = engine.changed
        assert changed is not None, "it has joined"
        changed.clear()
        orders = engine.hear(poll)
        newest = self._newest()
        if not orders and newest == poll.newest and not engine.has_left:
            try:
                async with asyncio.timeout(LONGEST_POLL_S):
                    await changed.wait()
            except TimeoutError:
                pass
            orders, newest = engine.hear(poll), self._newest()
        return _answer(Orders(orders, newest))

    async def _answer(self, request: Request) -> Response:
        answer: SiteAnswer = await read_json(request, SiteAnswer, self._most)
        self._of(answer.key).answer(answer)
        return json_answer({})

    async def _leave(self, request: Request) -> Response:
        leaving: Leaving = await read_json(request, Leaving, SMALL_BYTES)
        engine = self._of(leaving.key)
        if leaving.error:
            engine.lose(f"the engine of {engine.site} failed: {leaving.error[:2000]}")
        engine.leaves = True
        return json_answer({})

    async def _weights(self, request: Request) -> Response:
        path = self._members.store.path(request.path_params["version"], request.path_params["part"])
        if path is not None:
            with contextlib.suppress(FileNotFoundError):  # it is removed by another thread
                return FileResponse(path, media_type="application/octet-stream", stat_result=path.stat())
        raise HTTPException(404, "the run does not hold this version (any more)")

    def _of(self, key: str) -> FarEngine:
        engine = self._members.of(key)
        if engine is None and (why := self._members.refused(key)) is not None:
            raise HTTPException(409, why)
        if engine is None:
            raise HTTPException(410, "the run knows no engine of this key (any more)")
        return engine

    def _newest(self) -> int | None:
        newest = self._members.store.newest
        return None if newest is None else newest.version


def _answer(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _wake(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(changed.set)


def token_of(config: Config, settings: SitesConfig) -> str:
    """The token that sites bring: that of `rollout.sites.token_file` or the environment, else one of the run's folder.

    Raises:
        ConfigError: it cannot be read, or is too short.
    """
    token = read_token(settings.token_file, f"{FIELD}.token_file", TOKEN_VARIABLE, ConfigError)
    if token is not None:
        return token
    path = Path(config.run_folder) / FOLDER / TOKEN
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_text_atomically(path, f"{secrets.token_urlsafe(2 * SHORTEST_TOKEN)}\n", is_private=True)
    return path.read_text().strip()


def write_address(config: Config, settings: SitesConfig, port: int, token: str) -> None:
    """Write where the run listens, for `megarl node join RUN` on machines that see the run's folder."""
    path = Path(config.run_folder) / FOLDER / ADDRESS
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    write_text_atomically(path, json.dumps({"url": f"http://{host}:{port}", "token": token}) + "\n", is_private=True)
