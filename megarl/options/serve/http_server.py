"""The HTTP server: uvicorn that ends in order, keeping models on a signal, and at once where the ranks are lost."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn

from megarl.errors import ConfigError
from megarl.options.serve.figures import CountedApp, ServerFigures
from megarl.options.serve.section import ServeConfig
from megarl.system.http_server import Server, server_config

if TYPE_CHECKING:
    from fastapi import FastAPI

GRACE_S = 10.0
"""For requests that are being answered, once the service has stopped."""
DOWN_S = 60.0
"""For a server whose ranks are lost to be down; then whoever waits for that is told the error."""


class Closable(Protocol):
    """Something that is closed in the server's loop."""

    async def close(self) -> None:
        """End what it has under way."""


class HttpServer:
    """Serves an application on a socket until a signal, or until ranks are lost."""

    def __init__(self, settings: ServeConfig, figures: ServerFigures, is_down: threading.Event) -> None:
        """`is_down` is set when no client is answered any more; by whoever called, where `answer` has not."""
        self._settings, self._figures, self._is_down = settings, figures, is_down
        self._server: _Uvicorn | None = None
        self._error: BaseException | None = None

    def lost(self, error: BaseException) -> None:
        """End the server because ranks are lost; returns when it answers no client, so that none is told of it.

        A thread other than the server's calls this.
        """
        if self._error is None:
            self._error = error
            logging.getLogger("uvicorn.error").disabled = True  # requests that end here are asked again
            if self._server is not None:
                self._server.force_exit = self._server.should_exit = True
        if self._server is not None and self._server.started:
            self._is_down.wait(DOWN_S)

    def stop(self) -> None:
        """End the server in order, as a signal does."""
        if self._server is not None:
            self._server.should_exit = True

    async def answer(self, app: FastAPI, sampler: Closable, listening: socket.socket) -> None:
        """Serve until told to stop; then models are kept.

        Raises:
            ConfigError: the files of TLS are none.
            WorkerError, DeadlineError: what `lost` was told.
            Exception: the service did not start.
        """
        settings = self._settings
        config = server_config(
            CountedApp(app, self._figures),
            grace_s=int(GRACE_S),
            lifespan="on",
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"serve.tls_certificate is {settings.tls_certificate} and serve.tls_key is {settings.tls_key}, which are no "
                f"certificate and its key ({error}); they must be PEM files that belong together"
            ) from None
        self._server = _Uvicorn(config, app.state.service)
        if self._error is not None:  # lost while it started
            self._server.force_exit = self._server.should_exit = True
        try:
            await self._server.serve([listening])
        finally:
            if self._error is not None:  # nothing of the models is left to keep; the journal has what was answered
                app.state.service.abandon()
                self._is_down.set()
            await sampler.close()
        failure: BaseException | None = self._error or getattr(app.state, "start_error", None)
        if failure is not None:
            raise failure


class _Uvicorn(Server):
    """A server that stops the service before it closes connections."""

    def __init__(self, config: uvicorn.Config, service: Any) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End long polls and keep models, then close connections."""
        if not self.force_exit:
            await self._service.stop()
        await super().shutdown(sockets)
        await asyncio.sleep(0)
