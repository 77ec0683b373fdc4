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
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megarl.errors import EpisodeError
from megarl.options.agents import anthropic_form, openai_form, responses_form
from megarl.options.agents.messages import ChatRequest, RequestError
from megarl.options.agents.session import AgentSession
from megarl.options.agents.tree import Turn
from megarl.rollout.episodes.commands import CommandFolder
from megarl.system.http_server import Admission, ServerThread, application, json_answer, listen, read_json
from megarl.system.socket_names import SocketName

MAX_REQUEST_BYTES = 64 << 20
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
        try:
            listening = listen(host, 0)
        except OSError as error:
            raise EpisodeError(f"rollout.episode.agent.host is {host}, on which nothing can listen: {error}") from None
        app = Admission(self._application(), token=None, is_open=False, most_bytes=MAX_REQUEST_BYTES)
        self._server = ServerThread(app, listening, "agent-endpoint")
        self.port = self._server.port
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
        self._server.close()
        self._name.close()

    def _application(self) -> Starlette:
        openai, anthropic = openai_form.error, anthropic_form.error
        asked = partial(_asked, self._session)
        return application(
            [
                Route("/v1/chat/completions", asked(self._chat_completion, openai), methods=["POST"]),
                Route("/v1/responses", asked(self._response, openai), methods=["POST"]),
                Route("/v1/messages", asked(self._message, anthropic), methods=["POST"]),
                Route("/v1/reward", asked(self._reward, openai), methods=["POST"]),
                Route("/v1/sandbox/run", asked(self._run_in_sandbox, openai), methods=["POST"]),
                Route("/v1/models", asked(self._list_models, openai)),
                Route("/v1/models/{name:path}", asked(self._tell_model, openai)),
            ]
        )

    # requests -----------------------------------------------------------------------------------------------------

    def _session(self, request: Request) -> AgentSession:
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

    async def _turns(self, session: AgentSession, asked: ChatRequest, request: Request) -> list[Turn]:
        self._check_model(asked.model)
        # the packages of OpenAI and Anthropic say so when they ask again
        asked = replace(asked, is_retry=request.headers.get("x-stainless-retry-count", "0") != "0")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.answers(asked), session.loop))

    async def _chat_completion(self, request: Request, session: AgentSession, body: dict[str, Any]) -> Response:
        chat = await _read(session, openai_form.read_request, body)
        turns, created = await self._turns(session, chat, request), int(time.time())
        chunks = openai_form.chunks(turns, chat.model, created, with_usage=chat.with_usage)
        lines = chain((f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), ["data: [DONE]\n\n"])
        return _Delivery(turns, openai_form.answer(turns, chat.model, created), lines if chat.stream else None)

    async def _response(self, request: Request, session: AgentSession, body: dict[str, Any]) -> Response:
        response_request = await _read(session, responses_form.read_request, body, session.conversations)
        turns, created = await self._turns(session, response_request.chat, request), int(time.time())
        whole = responses_form.answer(turns[0], response_request, body, created)
        session.conversations[whole["id"]] = (*response_request.conversation, turns[0].said)
        events = map(_event, responses_form.events(whole))
        return _Delivery(turns, whole, events if response_request.chat.stream else None)

    async def _message(self, request: Request, session: AgentSession, body: dict[str, Any]) -> Response:
        chat = await _read(session, anthropic_form.read_request, body)
        turns = await self._turns(session, chat, request)
        events = map(_event, anthropic_form.events(turns[0], chat.model))
        return _Delivery(turns, anthropic_form.answer(turns[0], chat.model), events if chat.stream else None)

    async def _reward(self, request: Request, session: AgentSession, body: dict[str, Any]) -> Response:
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < LARGEST_REWARD:
            raise RequestError(f"reward is {reward!r:.60}; it must be a finite number")
        session.loop.call_soon_threadsafe(setattr, session, "reward", float(reward))
        return json_answer({"reward": reward})

    async def _run_in_sandbox(self, request: Request, session: AgentSession, body: dict[str, Any]) -> Response:
        sandbox = self._sandboxes.get(_key(request))
        if sandbox is None:
            raise RequestError(
                "this episode has no sandbox that its agent may ask for (rollout.episode.sandbox)", "no_sandbox", 404
            )
        command, stdin, timeout_s = read_command(body)
        running = asyncio.run_coroutine_threadsafe(sandbox.run(command, stdin, timeout_s), session.loop)
        try:
            result = await asyncio.wrap_future(running)
        except EpisodeError as error:
            raise RequestError(f"the command was not run: {error}", "sandbox_gone", 503) from None
        return json_answer(asdict(result))

    async def _list_models(self, request: Request, session: AgentSession, body: dict[str, Any]) -> Response:
        return json_answer({"object": "list", "data": [_model(name) for name in self.models]})

    async def _tell_model(self, request: Request, session: AgentSession, body: dict[str, Any]) -> Response:
        self._check_model(request.path_params["name"])
        return json_answer(_model(request.path_params["name"]))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}


def _event(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


class _Delivery(Response):
    """The answer `whole`, or in its place server-sent events; the turns in it count as delivered when all of it went out."""

    def __init__(self, turns: Sequence[Turn], whole: dict[str, Any], events: Iterable[str] | None) -> None:
        kind, further = ("application/json", {}) if events is None else ("text/event-stream", {"Cache-Control": "no-cache"})
        super().__init__(None, headers=further, media_type=kind)
        self._turns, self._lines = turns, [json.dumps(whole)] if events is None else events
        del self.headers["content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for line in self._lines:
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
        await asyncio.sleep(0)  # so that a client that has left is heard of
        if await Request(scope, receive).is_disconnected():
            return
        await send({"type": "http.response.body", "body": b""})
        for turn in self._turns:
            turn.is_delivered = True


def _key(request: Request) -> str:
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


def _asked(
    session_of: Callable[[Request], AgentSession],
    handle: Callable[[Request, AgentSession, dict[str, Any]], Coroutine[Any, Any, Response]],
    error_form: Callable[[str, str], dict[str, Any]],
) -> Callable[[Request], Awaitable[Response]]:
    """`handle`, given the session of the key and then the body; what is refused is told in the protocol's own form. It is
    cancelled when its client goes away: what was sampled for that waits for its next try."""

    async def handled(request: Request) -> Response:
        try:
            session = session_of(request)  # before its body is read
            body = await _body(request) if request.method == "POST" else {}
            return await _while_connected(request, handle(request, session, body))
        except RequestError as error:
            return json_answer(error_form(str(error), error.code), error.status)

    return handled


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = await read_json(request, Any, MAX_REQUEST_BYTES)
    except HTTPException as error:
        raise RequestError(error.detail, status=error.status_code) from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


async def _while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        RequestError: the episode has ended meanwhile.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.cancelled():
            raise RequestError("the episode of this key has ended", "episode_ended", 410)
        return working.result() if working.done() else Response(status_code=499)
    finally:
        for task in (working, leaving):
            task.cancel()


async def _left(request: Request) -> None:
    """Return when the client has gone away; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
