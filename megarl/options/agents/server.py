"""The endpoint at which agents act, for whoever has the key of an episode: OpenAI's chat completions and responses, and
Anthropic's messages.

`POST /v1/chat/completions`, `POST /v1/responses`, `POST /v1/messages`, `GET /v1/models`, `POST /v1/reward` with
`{"reward": number}`, by which an agent says what its episode is worth, and `POST /v1/sandbox/run`, by which it runs commands in
its episode's sandbox. It runs in a thread and an event loop of its own; sessions are asked in theirs.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, TypeVar

from aiohttp import web

from megarl.errors import EpisodeError
from megarl.options.agents import anthropic_form, openai_form, responses_form
from megarl.options.agents.messages import ChatRequest, RequestError
from megarl.options.agents.session import AgentSession
from megarl.options.agents.tree import Turn
from megarl.rollout.episodes.commands import CommandFolder
from megarl.system.socket_names import SocketName

MAX_REQUEST_BYTES = 64 << 20
START_S = 30.0
LARGEST_REWARD = 1e300
"""Sums of rewards are finite, and so are a policy's numbers of any length."""
LONGEST_S = 86400
"""Of a command."""

T = TypeVar("T")


class SessionServer:
    """Serves every session that is open, each under a key of its own."""

    def __init__(self, models: Sequence[str], host: str = "127.0.0.1") -> None:
        """`models`: the names by which a client may ask for the policy.

        Raises:
            EpisodeError: nothing can listen on `host`.
        """
        self.models, self._host = tuple(models), host
        self._sessions: dict[str, AgentSession] = {}
        self._sandboxes: dict[str, CommandFolder] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agent-endpoint", daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        try:
            self.port = self._in_loop(self._start())
        except OSError as error:
            self.close()
            raise EpisodeError(f"rollout.episode.agent.host is {host}, on which nothing can listen: {error}") from None
        self._name = SocketName(self.port, "endpoint of agents", "the key of an open episode")

    @property
    def url(self) -> str:
        """The address that it listens at, without `/v1`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def open(self, session: AgentSession, sandbox: CommandFolder | None = None) -> str:
        """Serve `session`, and run commands in `sandbox` for it; returns its key."""
        key = f"megarl-{secrets.token_urlsafe(32)}"
        if sandbox is not None:
            self._sandboxes[key] = sandbox
        self._sessions[key] = session
        return key

    def end(self, key: str) -> None:
        """Answer requests with `key` no longer."""
        self._sandboxes.pop(key, None)
        session = self._sessions.pop(key, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        """Stop listening, and end the thread."""
        if not self._loop.is_running():
            return
        if self._runner is not None:
            self._in_loop(self._runner.cleanup())
            self._name.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._loop.is_running():
            self._loop.close()

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _start(self) -> int:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", _guarded(self._chat_completion, openai_form.error))
        app.router.add_post("/v1/responses", _guarded(self._response, openai_form.error))
        app.router.add_post("/v1/messages", _guarded(self._message, anthropic_form.error))
        app.router.add_post("/v1/reward", _guarded(self._reward, openai_form.error))
        app.router.add_post("/v1/sandbox/run", _guarded(self._run_in_sandbox, openai_form.error))
        app.router.add_get("/v1/models", _guarded(self._list_models, openai_form.error))
        app.router.add_get("/v1/models/{name:.+}", _guarded(self._tell_model, openai_form.error))
        # a client that goes away must be noticed: what was sampled for it waits for its next try
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    # requests -----------------------------------------------------------------------------------------------------

    def _session(self, request: web.Request) -> AgentSession:
        session = self._sessions.get(_key(request))  # a random key of 256 bits: its hash is looked up, no prefix is compared
        if session is None:
            raise RequestError("this key belongs to no episode that is open", "no_such_key", 401)
        return session

    def _check_model(self, name: str) -> None:
        if name not in self.models:
            raise RequestError(
                f"model is '{name}', which is not served here; it must be {' or '.join(self.models)} "
                "(rollout.episode.agent.models)",
                "model_not_found", 404,
            )  # fmt: skip

    async def _turns(self, session: AgentSession, asked: ChatRequest, request: web.Request) -> list[Turn]:
        self._check_model(asked.model)
        # the packages of OpenAI and Anthropic say so when they ask again
        asked = replace(asked, is_retry=request.headers.get("x-stainless-retry-count", "0") != "0")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.answers(asked), session.loop))

    async def _chat_completion(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _body(request)
        chat = await _read(session, openai_form.read_request, body)
        turns, created = await self._turns(session, chat, request), int(time.time())
        chunks = openai_form.chunks(turns, chat.model, created, with_usage=chat.with_usage)
        lines = chain((f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), ["data: [DONE]\n\n"])
        return await _deliver(request, turns, openai_form.answer(turns, chat.model, created), lines if chat.stream else None)

    async def _response(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _body(request)
        response_request = await _read(session, responses_form.read_request, body, session.conversations)
        turns, created = await self._turns(session, response_request.chat, request), int(time.time())
        whole = responses_form.answer(turns[0], response_request, body, created)
        session.conversations[whole["id"]] = (*response_request.conversation, turns[0].said)
        events = map(_event, responses_form.events(whole))
        return await _deliver(request, turns, whole, events if response_request.chat.stream else None)

    async def _message(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _body(request)
        chat = await _read(session, anthropic_form.read_request, body)
        turns = await self._turns(session, chat, request)
        events = map(_event, anthropic_form.events(turns[0], chat.model))
        return await _deliver(request, turns, anthropic_form.answer(turns[0], chat.model), events if chat.stream else None)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _body(request)
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < LARGEST_REWARD:
            raise RequestError(f"reward is {reward!r:.60}; it must be a finite number")
        session.loop.call_soon_threadsafe(setattr, session, "reward", float(reward))
        return web.json_response({"reward": reward})

    async def _run_in_sandbox(self, request: web.Request) -> web.StreamResponse:
        session, sandbox = self._session(request), self._sandboxes.get(_key(request))
        if sandbox is None:
            raise RequestError(
                "this episode has no sandbox that its agent may ask for (rollout.episode.sandbox)", "no_sandbox", 404
            )
        command, stdin, timeout_s = read_command(await _body(request))
        running = asyncio.run_coroutine_threadsafe(sandbox.run(command, stdin, timeout_s), session.loop)
        try:
            result = await asyncio.wrap_future(running)
        except EpisodeError as error:
            raise RequestError(f"the command was not run: {error}", "sandbox_gone", 503) from None
        return web.json_response(asdict(result))

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response({"object": "list", "data": [_model(name) for name in self.models]})

    async def _tell_model(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        self._check_model(request.match_info["name"])
        return web.json_response(_model(request.match_info["name"]))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}


def _event(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


async def _deliver(
    request: web.Request, turns: Sequence[Turn], whole: dict[str, Any], events: Iterable[str] | None
) -> web.StreamResponse:
    """Send `whole`, or in its place server-sent events; the turns in it count as delivered when all of it went out."""
    if events is None:
        response: web.StreamResponse = web.json_response(whole)
    else:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for line in events or ():
        await response.write(line.encode())
    await response.write_eof()
    for turn in turns:
        turn.is_delivered = True
    return response


def _key(request: web.Request) -> str:
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return bearer or request.headers.get("x-api-key", "")


def read_command(body: dict[str, Any]) -> tuple[str | list[str], str, float | None]:
    """The command, its input and its time limit (None: as configured) in the body of a request.

    Raises:
        RequestError: one of them is missing or of another kind.
    """
    command: Any = body.get("command")
    stdin: Any = body.get("stdin", "")
    timeout_s: Any = body.get("timeout_s")
    is_list = isinstance(command, list) and command and all(isinstance(part, str) for part in command)
    if not is_list and not (isinstance(command, str) and command):
        raise RequestError("command must be a shell's text, or a list of a program and its arguments")
    if not isinstance(stdin, str):
        raise RequestError("stdin must be a text")
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and 0 < timeout_s <= LONGEST_S):
        raise RequestError(f"timeout_s is {timeout_s!r:.60}; it must be a number above 0 and at most {LONGEST_S}, or left out")
    return command, stdin, timeout_s


async def _read(session: AgentSession, read: Callable[..., T], *given: Any) -> T:
    """Read a request's body by `read`; pictures in it are decoded beside the endpoint's loop."""
    if session.pictures is None:
        return read(*given, None)
    return await asyncio.to_thread(read, *given, session.pictures)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        raise RequestError("the body must be a JSON object") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _guarded(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]], error_form: Callable[[str, str], dict[str, Any]]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """`handle`, with what it refuses told in the protocol's own form."""

    async def handled(request: web.Request) -> web.StreamResponse:
        try:
            return await handle(request)
        except RequestError as error:
            return web.json_response(error_form(str(error), error.code), status=error.status)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the client went away
                raise
            closed = "the episode of this key has ended"
            return web.json_response(error_form(closed, "episode_ended"), status=410)

    return handled
