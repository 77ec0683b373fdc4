"""An application on a real socket of this machine, for the time of a `with` block: aiohttp's, or one of megarl's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from megarl.system.http_server import Admission, ServerThread, listen


@contextmanager
def running(app: web.Application | Admission) -> Iterator[str]:
    """Serve `app` from a thread; gives its URL, without a slash at the end."""
    if isinstance(app, Admission):
        server = ServerThread(app, listen("127.0.0.1", 0), "served")
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            server.close()
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
