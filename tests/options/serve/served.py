"""A server for tests: the app by uvicorn on loopback in a thread, with the reference trainer and sampler."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tinker

from megarl.options.serve.app import build_app
from megarl.options.serve.journal import RequestJournal
from megarl.options.serve.service import Service
from megarl.options.serve.settings import ServiceOptions
from megarl.options.serve.store import open_store
from megarl.options.serve.tenants import Tenants
from megarl.system.http_server import Server, server_config
from tests.options.serve.clients import closed_afterwards
from tests.options.serve.reference import ReferenceSampler, ReferenceTrainer

T = TypeVar("T")
BASE = "Qwen/Qwen3-0.6B"
KEY = "tml-local"


@dataclass
class Served:
    """A running server: where it is, and its parts."""

    url: str
    service: Service
    trainer: ReferenceTrainer
    sampler: ReferenceSampler
    loop: asyncio.AbstractEventLoop
    said: list[str] = field(default_factory=list)

    def client(self, key: str = KEY) -> tinker.ServiceClient:
        """A client of the package, unchanged."""
        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def call(self, function: Any, *args: Any) -> Any:
        """Call something in the server's loop."""

        async def work() -> Any:
            return function(*args)

        return self.run(work())


@contextmanager
def serving(
    folder: Path,
    *,
    tenants: Path | None = None,
    journal: bool = True,
    trainer: ReferenceTrainer | None = None,
    crash: bool = False,
    **settings: Any,
) -> Iterator[Served]:
    """Serve from `folder`; with `crash` the end is that of a killed process: nothing is written at it."""
    said: list[str] = []
    options = ServiceOptions(
        models={BASE: 256}, scratch=folder / "scratch", context_tokens=256, say=said.append, **{"poll_s": 5.0, **settings}
    )
    keys = Tenants(tenants)
    trainer, sampler = trainer or ReferenceTrainer(), ReferenceSampler()
    kept = RequestJournal(folder / "journal") if journal else None
    service = Service(
        options, trainer=trainer, sampler=sampler, store=open_store(folder, say=said.append), tenants=keys, journal=kept
    )
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = Server(server_config(build_app(service), grace_s=1, lifespan="on"))
    loops: list[asyncio.AbstractEventLoop] = []

    def run() -> None:
        async def main() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve([listening])

        asyncio.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    served = Served(f"http://127.0.0.1:{listening.getsockname()[1]}", service, trainer, sampler, loops[0], said)
    try:
        with closed_afterwards():
            yield served
    finally:
        if crash:
            service._stopped = True
        served.call(sampler.gate.set)
        trainer.gate.set()
        served.call(service.promises.stop)
        server.should_exit = True
        thread.join(30)
        listening.close()
