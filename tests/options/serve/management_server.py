"""A server on loopback with the REST routes alone, two tenants and what they own, for tests by the real client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse

from megarl.options.serve import tenants as module
from megarl.options.serve.management import management_router
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.registry import SamplerRecord, ServedRun, SessionRecord
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import Tenant, Tenants, add_tenant
from megarl.options.serve.values import RequestError
from tests.options.serve.clients import closed_afterwards

CLOCK_START = 1_800_000_000.0
ADAPTERS = {"adapter_config.json": b'{"r": 32}', "adapter_model.safetensors": bytes(range(256)) * 300}
"""Files of a PEFT folder, as names and contents."""


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = CLOCK_START

    def __call__(self) -> float:
        return self.now


@dataclass
class ManagementServer:
    """The address, the store behind it, and a key for each tenant; `plain` sends requests as they are."""

    url: str
    store: CheckpointStore
    tenants: Tenants
    keys: dict[str, str]
    clock: Clock
    log: list[str]
    plain: httpx.Client


def make_app(store: CheckpointStore, tenants: Tenants) -> FastAPI:
    """The router, the answers to errors, and what the client asks of every server when it starts."""
    app = FastAPI()

    async def who(x_api_key: str | None = Header(default=None)) -> Tenant:
        return await tenants.tenant_of(x_api_key)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status)

    @app.post("/api/v1/client/config")
    async def config() -> dict[str, Any]:
        return {"pjwt_auth_enabled": True, "use_pyqwest_transport": False}

    @app.post("/api/v1/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {}

    @app.post("/api/v1/auth/token")
    async def token(request: Request) -> dict[str, str]:
        return {"jwt": tenants.token(await tenants.tenant_of(request.headers.get("x-api-key")))}

    app.include_router(management_router(store, tenants, who))
    return app


def own_things(store: CheckpointStore, tenant: str, number: int) -> None:
    """A session with a model, two samplers and a checkpoint of each kind; `number` is in all their ids."""
    session, created = f"{number:08d}-aaaa", CLOCK_START - 1_000 + number
    metadata = {"team": tenant, "steps": 5}
    registry = store.registry
    registry.sessions.add(
        SessionRecord(
            session, tenant, created, user_metadata=metadata, display_name=f"Nightly run {number}", last_seen=CLOCK_START
        )
    )
    run = f"{session}:train:0"
    registry.runs.add(ServedRun(run, tenant, created, session, "Qwen/Qwen3-0.6B", rank=32, user_metadata=metadata))
    registry.samplers.add(SamplerRecord(f"{session}:sample:0", tenant, created, session, "Qwen/Qwen3-0.6B"))
    named = f"tinker://{run}/sampler_weights/final"
    registry.samplers.add(SamplerRecord(f"{session}:sample:1", tenant, created, session, "Qwen/Qwen3-0.6B", named))
    switches = {"train_attn": True, "train_mlp": False, "train_unembed": True}
    made = {"base_model": "Qwen/Qwen3-0.6B", "rank": 32, "optimizer": {"type": "adamw"}, **switches}
    for kind in ("weights", "sampler_weights", "external_weights"):
        with store.writing(Tenant(tenant), CheckpointPath(run, kind, "final"), made, user_metadata={"kind": kind}) as folder:
            for name, content in ({"shard-0": b"moments"} if kind == "weights" else ADAPTERS).items():
                (folder / name).write_bytes(content)


@contextmanager
def running(root: Path, *, names: tuple[str, ...] = ("anna", "ben")) -> Iterator[ManagementServer]:
    """A server that runs for the block; things of tenant i have number i."""
    clock, log = Clock(), []
    keys = {name: add_tenant(root / "tenants.yaml", name).partition("TINKER_API_KEY=")[2].split()[0] for name in names}
    store = CheckpointStore(root / "serve", clock=clock, say=log.append)
    tenants = Tenants(root / "tenants.yaml", secret=b"s" * 32, say=log.append)
    for number, name in enumerate(names):
        own_things(store, name, number)
    server = uvicorn.Server(uvicorn.Config(make_app(store, tenants), host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with closed_afterwards(), httpx.Client(trust_env=False) as plain:
            yield ManagementServer(f"http://127.0.0.1:{port}", store, tenants, keys, clock, log, plain)
    finally:
        server.should_exit = True
        thread.join(30)


@contextmanager
def quick_hashes() -> Iterator[None]:
    """Hashes of keys that cost little, for the block."""
    cost, none = module.COST, module._NO_HASH
    module.COST, module._NO_HASH = 10, none.replace("scrypt$14", "scrypt$10")
    try:
        yield
    finally:
        module.COST, module._NO_HASH = cost, none
