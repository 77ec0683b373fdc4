"""Routes of the client's protocol over HTTP: bodies are read up to a limit, tenants found by keys, errors have one form.

A training request that is refused fails by its future, in its turn: its model's later requests are not kept waiting for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b
from inspect import isawaitable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from tinker import types

from megarl.options.serve.futures import JSON
from megarl.options.serve.management import management_router
from megarl.options.serve.models import ExternalRequest
from megarl.options.serve.service import Service
from megarl.options.serve.tenants import Tenant
from megarl.options.serve.values import RequestError
from megarl.options.serve.wire import HEAD_BYTES, PROTOBUF, read_address, read_call, read_json, too_large
from megarl.options.serve.worker import REFUSED_PASS
from megarl.system.http_server import Admission

API = "/api/v1"
MOST_JSON_BYTES = 1 << 26
"""Bytes of a JSON body with pictures or a graph in it."""
MOST_SMALL_BYTES = 1 << 20
"""Bytes of any other."""


class TooLarge(RequestError):
    """A body that is larger than it may be; `head` is its start."""

    def __init__(self, sentence: str, head: bytes) -> None:
        super().__init__(sentence, status=413)
        self.head = head


def build_app(service: Service) -> FastAPI:
    """The application of a service, which it starts and stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await service.start()
        except BaseException as error:
            app.state.start_error = error
            raise
        try:
            yield
        finally:
            await service.stop()

    async def who(request: Request) -> Tenant:
        return await service.tenants.tenant_of(request.headers.get("x-api-key"))

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    is_open = not service.tenants.are_several
    app.add_middleware(Admission, token=None, is_open=is_open, most_bytes=None, kinds=("application/json", PROTOBUF))
    app.state.service = service
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _not_there)
    app.add_exception_handler(Exception, _failed)
    _add_plain(app, service, who)
    _add_session_routes(app, service, who)
    _add_training(app, service, who)
    _add_sampling(app, service, who)
    app.include_router(management_router(service.store, service.tenants, who))
    return app


def _add_plain(app: FastAPI, service: Service, who: Callable[[Request], Awaitable[Tenant]]) -> None:
    @app.get(f"{API}/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(f"{API}/get_server_capabilities")
    async def capabilities(request: Request) -> dict[str, Any]:
        await who(request)
        return service.capabilities()

    @app.post(f"{API}/client/config")
    async def client_config(request: Request) -> dict[str, Any]:
        await who(request)
        return service.client_config()

    @app.post(f"{API}/client/dynamic_config")
    async def dynamic_config(request: Request) -> dict[str, Any]:
        await who(request)
        return service.dynamic_config()

    @app.post(f"{API}/auth/token")
    async def token(request: Request) -> dict[str, str]:
        return {"jwt": service.tenants.token(await who(request))}

    @app.post(f"{API}/telemetry")
    async def telemetry(request: Request) -> dict[str, str]:
        await who(request)
        return {"status": "accepted"}


def _add_session_routes(app: FastAPI, service: Service, who: Callable[[Request], Awaitable[Tenant]]) -> None:
    add = partial(_add_json, app, service, who)
    add("create_session", types.CreateSessionRequest, service.create_session)
    add("session_heartbeat", types.SessionHeartbeatRequest, service.heartbeat)
    add("create_sampling_session", types.CreateSamplingSessionRequest, service.samplers.create)
    add("join_sampling_session", types.JoinSamplingSessionRequest, service.samplers.join)
    add("create_custom_loss", types.CreateCustomLossRequest, service.create_custom_loss, MOST_JSON_BYTES)
    add("create_model", types.CreateModelRequest, service.models.create)
    add("unload_model", types.UnloadModelRequest, service.models.unload)
    add("get_info", types.GetInfoRequest, service.models.info)

    @app.post(f"{API}/sessions/{{session}}/finish")
    async def finish(request: Request, session: str) -> dict[str, Any]:
        tenant = await who(request)
        try:
            body = json.loads(await read_body(request, 1 << 16) or b"{}")
        except ValueError:
            raise RequestError("the body must be a JSON object") from None
        return service.finish_session(tenant, session, body if isinstance(body, dict) else {})

    @app.post(f"{API}/copy_weights")
    async def copy_weights(request: Request) -> dict[str, Any]:
        tenant = await who(request)
        asked = read_json(types.CopyWeightsRequest, await read_body(request, 1 << 16))
        body_key = request.headers.get("x-idempotency-key", "")
        return await service.copy_weights(
            tenant, asked, body_key[:200] or blake2b(asked.model_dump_json().encode()).hexdigest()
        )


def _add_training(app: FastAPI, service: Service, who: Callable[[Request], Awaitable[Tenant]]) -> None:
    models = service.models
    for name, kind, call in (
        ("optim_step", types.OptimStepRequest, models.optim_step),
        ("save_weights", types.SaveWeightsRequest, models.save),
        ("save_weights_for_sampler", types.SaveWeightsForSamplerRequest, models.save_for_sampler),
        ("save_weights_external", ExternalRequest, models.save_external),
        ("load_weights", types.LoadWeightsRequest, service.load),
    ):
        _add_training_json(app, service, who, name, kind, call)

    @app.post(f"{API}/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        tenant = await who(request)
        if not request.headers.get("content-type", "").startswith(PROTOBUF):
            raise RequestError(f"Content-Type must be {PROTOBUF}, as clients of 0.38 send it", status=415)
        encoding = request.headers.get("content-encoding", "").strip().lower()
        most = service.options.max_body_bytes
        free = models.held.take(tenant, min(_length(request) or most, most))
        try:
            body = await read_body(request, most, HEAD_BYTES)
            call = await asyncio.to_thread(read_call, body, encoding, most)
        except RequestError as error:
            head = error.head if isinstance(error, TooLarge) else body[:HEAD_BYTES]
            address = read_address(head, encoding)
            if address is None:
                raise
            digest = blake2b(head, digest_size=16).digest()
            return await models.requests.refuse(tenant, *address, digest, str(error), kind=REFUSED_PASS)
        finally:
            free()
        return await models.forward_backward(tenant, call, body, encoding)


def _add_sampling(app: FastAPI, service: Service, who: Callable[[Request], Awaitable[Tenant]]) -> None:
    add = partial(_add_json, app, service, who)
    add("asample", types.SampleRequest, service.samplers.sample, MOST_JSON_BYTES)
    add("retrieve_futures", types.FuturesRetrieveRequest, service.retrieve_many)

    @app.post(f"{API}/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        tenant = await who(request)
        asked = read_json(types.FutureRetrieveRequest, await read_body(request, 1 << 16))
        reply = await service.retrieve(tenant, asked)
        return Response(reply.content, reply.status, media_type=reply.media)

    @app.post(f"{API}/cancel_future")
    async def cancel_future(request: Request) -> dict[str, Any]:
        tenant = await who(request)
        asked = read_json(types.FutureRetrieveRequest, await read_body(request, 1 << 16))
        service.promises.cancel(tenant.name, asked.request_id)
        return {}


def _add_json(
    app: FastAPI,
    service: Service,
    who: Callable[[Request], Awaitable[Tenant]],
    name: str,
    kind: type[BaseModel],
    call: Callable[[Tenant, Any], Any],
    most: int = MOST_SMALL_BYTES,
) -> None:
    """Add a route whose body, of at most `most` bytes, and answer are JSON."""

    @app.post(f"{API}/{name}", name=name)
    async def route(request: Request) -> Response:
        tenant = await who(request)
        free = service.models.held.take(tenant, min(_length(request) or most, most))
        try:
            asked = read_json(kind, await read_body(request, most))
        finally:
            free()
        return await _as_json(call(tenant, asked))


def _add_training_json(
    app: FastAPI,
    service: Service,
    who: Callable[[Request], Awaitable[Tenant]],
    name: str,
    kind: type[BaseModel],
    call: Callable[[Tenant, Any], Any],
) -> None:
    """Add a route of a model's requests, which have numbers."""

    @app.post(f"{API}/{name}", name=name)
    async def route(request: Request) -> Response:
        tenant = await who(request)
        body = await read_body(request, MOST_SMALL_BYTES)
        try:
            asked = read_json(kind, body)
        except RequestError as error:
            address = _json_address(body)
            if address is None:
                raise
            digest = blake2b(body, digest_size=16).digest()
            return JSONResponse(await service.models.requests.refuse(tenant, *address, digest, str(error)))
        return await _as_json(call(tenant, asked))


async def _as_json(answer: Any) -> JSONResponse:
    """The answer of a call, which may have to be awaited."""
    return JSONResponse(await answer if isawaitable(answer) else answer)


def _json_address(body: bytes) -> tuple[str, int] | None:
    """The model and the number of a training request that is none otherwise."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model, seq = (found.get("model_id"), found.get("seq_id")) if isinstance(found, dict) else (None, None)
    is_address = isinstance(model, str) and isinstance(seq, int) and not isinstance(seq, bool)
    return (model, seq) if is_address else None  # type: ignore[return-value]


async def read_body(request: Request, most: int, head: int = 0) -> bytes:
    """The body of a request, of at most `most` bytes; of one that says to be larger, no more than its first `head`.

    Raises:
        TooLarge: it is larger.
    """
    size = _length(request)
    pieces, read = [], 0
    if size is not None and size > most and not head:
        raise TooLarge(too_large(size, most), b"")
    async for piece in request.stream():
        pieces.append(piece)
        read += len(piece)
        is_larger = size is not None and size > most
        if read > most or (is_larger and read >= head):
            raise TooLarge(too_large(size, most), b"".join(pieces)[:head])
    return b"".join(pieces)


def _length(request: Request) -> int | None:
    """The bytes that a body says it has."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdigit() and len(length) < 20 else None


def _error(status: int, sentence: str, category: str, headers: dict[str, str] | None = None) -> Response:
    content = {"error": sentence, "category": category, "detail": sentence}
    return JSONResponse(content, status, headers=headers, media_type=JSON)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {}
    if error.status == 401 and request.headers.get("x-api-key", "").startswith("eyJ"):
        headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
    return _error(error.status, str(error), "user", headers)


async def _not_there(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    sentence = f"{request.method} {request.url.path[:200]} is no part of this server, megarl serve"
    return _error(status, sentence if status in (404, 405) else str(getattr(error, "detail", error)), "user")


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, f"the server failed: {type(error).__name__}", "server")
