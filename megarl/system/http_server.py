"""HTTP servers, all made in this one way: an ASGI application behind checks of every request, on uvicorn with limits.

What a client may cost is limited before anything of it is believed: time (`http_connections.py`), connections, header, body and
what a packed body unpacks to. Where no token is asked, a web page in a browser on this machine is refused, as it could send
requests here by a name of its own, or a form: `Host` must be a name of this machine and a body must be JSON.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from megarl.system.bearer_tokens import is_loopback
from megarl.system.http_connections import WatchedProtocol, most_connections

AsgiMessage = MutableMapping[str, Any]
AsgiApp = Callable[
    [AsgiMessage, Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]], Awaitable[None]
]

KEPT_S = 15
"""For the next request of a connection; clients themselves keep theirs for 5 s, as httpx does."""
ACCEPTED_AT_ONCE = 8
WAITING_TO_BE_ACCEPTED = 1024
MOST_HEADER_BYTES = 32 << 10
MOST_VALUES = 1 << 20
"""Commas and brackets in a JSON body of any kind: a byte of them can make an object of 60."""
START_S = 30.0
JSON = "application/json"
_UTF8 = ("utf-8", "utf8", "us-ascii", "ascii")
_HEADERS = [("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"), ("Cross-Origin-Resource-Policy", "same-origin")]


class Admission:
    """An application behind what every request is asked before its body is read."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        token: str | None,
        is_open: bool,
        most_bytes: int | None,
        kinds: Sequence[str] = ("application/json",),
    ) -> None:
        """Requests bring `token` as bearer, unless it is None.

        `is_open`: nothing that is secret is asked, by `app` neither, so web pages are kept out. `most_bytes` of a body, which
        is of the media types `kinds`; None: `app` limits it.
        """
        self._app, self._token, self._is_open, self._most, self._kinds = app, token, is_open, most_bytes, tuple(kinds)

    async def __call__(self, scope: AsgiMessage, receive: Any, send: Any) -> None:
        """Answer a request that is refused, else have the application answer."""
        if scope["type"] == "http":
            refused = self._refusal(scope)
            if refused is not None:
                await json_answer({"error": refused[1]}, refused[0])(scope, receive, send)
                return
        with suppress(ClientDisconnect):  # no failure, and no lines in the log that strangers could fill it with
            await self._app(scope, receive, send)

    def _refusal(self, scope: AsgiMessage) -> tuple[int, str] | None:
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(pairs)
        malformed = _malformed(scope, pairs)
        if malformed is not None:
            return malformed
        if self._token is not None:
            brought = headers.get("authorization", "").encode()
            if not secrets.compare_digest(brought, f"Bearer {self._token}".encode()):
                return 401, "the token is missing or wrong"
        host = headers.get("host", "")
        if self._is_open and not is_loopback(_hostname(host)):
            return 403, "without a token this server answers requests for 127.0.0.1, [::1] and localhost only"
        if "origin" in headers and urlsplit(headers["origin"]).netloc.lower() != (host.lower() or None):
            return 403, "Origin names another site: this server answers no web page of others"
        return self._refused_body(headers)

    def _refused_body(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        length = headers.get("content-length", "0")
        if length == "0" and "transfer-encoding" not in headers:
            return None
        if self._most is not None and int(length) > self._most:
            return 413, f"the body has {length} bytes; it must have at most {self._most}"
        kind, *settings = (part.strip().lower() for part in headers.get("content-type", "").split(";"))
        if self._is_open and kind not in self._kinds:
            return 415, f"Content-Type must be {' or '.join(self._kinds)}"
        for setting in settings:
            name, _, value = setting.partition("=")
            if name.strip() == "charset" and value.strip(' "') not in _UTF8:
                return 400, "the charset in Content-Type must be utf-8, or left out"
        return None


def _malformed(scope: AsgiMessage, headers: Sequence[tuple[str, str]]) -> tuple[int, str] | None:
    """Status and sentence for a request that two servers could read in two ways, or with a header too large."""
    names = [name for name, _ in headers]
    if scope["http_version"] not in ("1.0", "1.1"):
        return 505, "HTTP must be 1.0 or 1.1"
    if sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES:
        return 431, f"the header must have at most {MOST_HEADER_BYTES} bytes"
    if "content-length" in names and "transfer-encoding" in names:
        return 400, "Content-Length and Transfer-Encoding are both given"
    for name in ("host", "origin", "authorization", "content-type", "content-encoding", "content-length"):
        if names.count(name) > 1:
            return 400, f"{name} is given more than once"
    if not scope["raw_path"].startswith(b"/") and scope["raw_path"] != b"*":
        return 400, "the path must begin with /"
    if not scope["path"].isprintable() or len(scope["raw_path"]) > MOST_HEADER_BYTES:
        return 400, "the path holds what cannot be printed, or is too long"
    return None


def _hostname(host: str) -> str:
    """The name in a `Host`; empty where it is none."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "") if parts.netloc == host and "@" not in host else ""
    except ValueError:
        return ""


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON, as Python writes it: numbers that are not finite are written, too."""
    return Response(json.dumps(value), status, headers, JSON)


def application(routes: Sequence[Route]) -> Starlette:
    """starlette's application with answers in JSON; it leads nobody elsewhere."""
    app = Starlette(routes=routes, exception_handlers={HTTPException: refusal_answer, Exception: failure_answer})
    app.router.redirect_slashes = False
    return app


async def refusal_answer(request: Request, error: Exception) -> Response:
    """The answer to what `read_json`, or starlette's router, has refused; a handler of exceptions for starlette."""
    assert isinstance(error, HTTPException)
    return json_answer({"error": error.detail}, error.status_code, error.headers)


async def failure_answer(request: Request, error: Exception) -> Response:
    """The answer where the server itself has failed, which says nothing of its insides."""
    return json_answer({"error": "the server failed; its log says why"}, 500)


async def read_json(request: Request, kind: Any, most_bytes: int) -> Any:
    """The JSON body of a request, as `msgspec` reads the type `kind`; unpacked if `Content-Encoding` is gzip or deflate.

    It is read in a thread. Its reader keeps the other threads waiting, but takes some 0.1 s for 70 MB of texts.

    Raises:
        HTTPException: 413, it has more than `most_bytes`, packed or unpacked, or too many values; 400, it is none.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise HTTPException(413, f"the body must have at most {most_bytes} bytes")
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    return await asyncio.to_thread(_read, bytes(body), packed, kind, most_bytes)


def _read(body: bytes, packed: str, kind: Any, most_bytes: int) -> Any:
    if packed != "identity":
        body = unpacked(body, packed, most_bytes)
    if kind is Any:
        check_values(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"the body is no JSON that this server takes: {error!s:.200}") from None


def check_values(body: bytes) -> None:
    """Refuse a JSON body of which objects would be made that take many times its size, and seconds.

    Raises:
        HTTPException: with status 413.
    """
    if len(body) > MOST_VALUES and sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        raise HTTPException(413, f"the body must have at most {MOST_VALUES} commas and brackets")


def unpacked(body: bytes, packed: str, most_bytes: int) -> bytes:
    """A body that is packed by gzip or deflate.

    Raises:
        HTTPException: 413, it has more than `most_bytes`, of which no more are made; 400, it is none of the two, or damaged.
    """
    kinds = {"gzip": 31, "x-gzip": 31, "deflate": 15}
    if packed not in kinds:
        raise HTTPException(
            400, "Content-Encoding must be gzip, deflate or identity, or left out", {"Accept-Encoding": "gzip, deflate"}
        )
    reader = zlib.decompressobj(kinds[packed])
    try:
        content = reader.decompress(body, most_bytes + 1)
    except zlib.error:
        raise HTTPException(400, f"the body is no {packed}, which its Content-Encoding says") from None
    if len(content) > most_bytes:
        raise HTTPException(413, f"the body must have at most {most_bytes} bytes unpacked")
    if not reader.eof or reader.unused_data:
        raise HTTPException(400, f"the body is no whole {packed}, which its Content-Encoding says")
    return content


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; OSError or OverflowError if nothing can listen there. `port` 0 takes a free one."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(WAITING_TO_BE_ACCEPTED)
    except (OSError, OverflowError):
        listening.close()
        raise
    return listening


def server_config(app: Any, *, grace_s: int, lifespan: Any = "off", **settings: Any) -> uvicorn.Config:
    """uvicorn's settings for an application; requests under way have `grace_s` at the end. `settings`: those of TLS."""
    return uvicorn.Config(
        app, loop="asyncio", http=WatchedProtocol, ws="none", lifespan=lifespan, interface="asgi3",
        log_config=None, log_level="error", access_log=False, headers=_HEADERS, server_header=False, proxy_headers=False,
        limit_concurrency=most_connections(), backlog=ACCEPTED_AT_ONCE, timeout_keep_alive=KEPT_S,
        timeout_graceful_shutdown=grace_s, **settings,
    )  # fmt: skip


class Server(uvicorn.Server):
    """uvicorn that ends in order on SIGINT and SIGTERM, and raises no signal again when it is down."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM as requests to stop; a second Ctrl-C leaves at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._told) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. asyncio accepts at once as many as may wait, so more may wait only once it has been told."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(WAITING_TO_BE_ACCEPTED)


class ServerThread:
    """A server in a thread and an event loop of its own."""

    def __init__(
        self, app: AsgiApp, listening: socket.socket, name: str, failed: Callable[[BaseException], None] | None = None
    ) -> None:
        """Serve on `listening`; returns once it does. `failed` is told what ended it."""
        self.port: int = listening.getsockname()[1]
        self._server, self._listening, self._failed = Server(server_config(app, grace_s=1)), listening, failed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.005)

    def close(self) -> None:
        """Stop listening, and end the thread."""
        self._server.should_exit = True
        self._thread.join(START_S)
        self._listening.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve([self._listening]))
        except BaseException as error:
            if self._failed is None:
                raise
            self._failed(error)
