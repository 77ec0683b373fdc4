"""`GET /metrics` and `GET /health` of a run that goes on, from a thread of the driver; see docs/watching.md.

It listens on this machine alone unless there is a token, takes nothing but GET, and whatever goes wrong in it is a line, never
the end of the run. A file says where it listens, as Prometheus' file discovery reads it.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from megarl.config import AnyConfig
from megarl.config.secrets import bearer
from megarl.errors import ConfigError
from megarl.observe.run_state import ENGINE_IS_UP, RunState, Snapshot
from megarl.options.telemetry.prometheus import exposition
from megarl.options.telemetry.section import trackers_of
from megarl.system.atomic_files import write_text_atomically
from megarl.system.bearer_tokens import is_loopback, read_token
from megarl.system.path_names import file_name_of
from megarl.system.socket_names import NOTHING, SocketName

FIELD = "trackers.prometheus"
TOKEN_VARIABLE = "MEGARL_METRICS_TOKEN"
TARGETS = ".prometheus"
"""Folder in `run.folder` with a file per run that names its endpoint; the file is gone when the run ends by itself."""
PATIENCE_S = 10.0
"""For a client to send its request."""


def open_endpoint(config: AnyConfig, state: RunState, *, is_continued: bool) -> MetricsEndpoint | None:
    """Serve `state` where `trackers.prometheus` says; None if it says nothing, or the port of a run that is continued is taken.

    Raises:
        ConfigError: a new run cannot listen there, as when the port is taken, or others could reach it without a token.
    """
    settings = trackers_of(config).prometheus
    if settings.port is None:
        return None
    token = read_token(settings.token_file, f"{FIELD}.token_file", TOKEN_VARIABLE, ConfigError)
    if token is None and not is_loopback(settings.host):
        raise ConfigError(
            f"{FIELD}.host is {settings.host}, which others can reach, so the endpoint needs a token: set {FIELD}.token_file, "
            f"or {TOKEN_VARIABLE}"
        )
    try:
        return MetricsEndpoint(state, settings.host, settings.port, token, targets_file(config))
    except OSError as error:
        at = f"{settings.host}:{settings.port}"
        trouble = f"{FIELD}.port is {settings.port}, but {at} cannot be listened on: {error.strerror or error}"
        if is_continued:  # what watches a run must not keep it from going on
            state.say(f"{trouble}; the run goes on without its endpoint")
            return None
        raise ConfigError(f"{trouble}; choose another port, 0 for a free one, or null for no endpoint") from None


def targets_file(config: AnyConfig) -> Path:
    """The file in which a run says where it listens: in one folder for all runs, as file discovery looks in one folder
    alone."""
    return Path(config.run.folder) / TARGETS / f"{file_name_of(config.run.name)}.json"


def health(now: Snapshot) -> tuple[int, dict[str, Any]]:
    """Status and body of `/health`: 503 while a rank does not answer, or while no engine is up."""
    ranks = [(group, rank, state) for group, states in now.ranks.items() for rank, state in enumerate(states)]
    why = [f"rank {rank} of {group} is {state}" for group, rank, state in ranks if state != "up"]
    if now.engines and not any(engine.condition in ENGINE_IS_UP for engine in now.engines):
        why.append("no engine is up")
    body = {
        "status": "failing" if why else "ok",
        "why": why,
        "run": now.run,
        "step": now.step,
        "steps": now.steps,
        "seconds_since_progress": round(now.at - now.progress_at, 3),
        "phase": now.phase,
        "phase_seconds": round(now.at - now.phase_since, 3),
        "restarts": now.restarts,
        "engines": [asdict(engine) for engine in now.engines],
        "ranks": {group: list(states) for group, states in now.ranks.items()},
    }
    return (503 if why else 200), body


class MetricsEndpoint:
    """The server and its thread. `port` is the one that it listens at."""

    def __init__(self, state: RunState, host: str, port: int, token: str | None, targets: Path) -> None:
        """Listen and serve; OSError if the address cannot be listened on."""
        self._state, self._targets = state, targets
        self._server = _Server((host, port), _handler(state, token, Lock()), self._say_once)
        self.port: int = self._server.server_address[1]
        self._name = SocketName(self.port, "metrics for Prometheus", "the token for metrics" if token is not None else NOTHING)
        shown = socket.gethostname() if _is_every_address(host) else host
        self.address = f"{f'[{shown}]' if ':' in shown else shown}:{self.port}"
        self._said = False
        Thread(target=self._serve, name="metrics-endpoint", daemon=True).start()

    def announce(self) -> None:
        """Write where it listens, if that folder, which may be another user's, can be written to."""
        try:
            self._targets.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self._targets, json.dumps([{"targets": [self.address], "labels": {}}]) + "\n")
        except OSError as error:
            self._state.say(f"{self._targets} cannot be written ({error.strerror}): by it nobody finds {self.address}")

    def close(self) -> None:
        """Stop listening; the run has ended by itself."""
        self._server.shutdown()
        self._server.server_close()
        self._name.close()
        with suppress(OSError):
            self._targets.unlink(missing_ok=True)

    def _serve(self) -> None:
        try:
            self._server.serve_forever(poll_interval=0.2)
        except Exception as error:  # noqa: BLE001 - the run goes on without it
            self._say_once(error)

    def _say_once(self, error: BaseException) -> None:
        if not self._said:
            self._said = True
            self._state.say(f"the endpoint for Prometheus failed ({type(error).__name__}: {error}); the run goes on")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], failed: Callable[[BaseException], None]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._failed = failed
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the look-up of the host's name that http.server makes, which a network may let wait."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):  # else a client left
            self._failed(error)


def _handler(state: RunState, token: str | None, one_at_a_time: Lock) -> type[BaseHTTPRequestHandler]:
    def snapshot() -> Snapshot:
        with one_at_a_time:
            return state.snapshot()

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_S

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if (refused := _refusal(self.headers, token)) is not None:
                self._answer(refused[0], "text/plain; charset=utf-8", refused[1].encode())
            elif path == "/metrics":
                self._answer(200, *exposition(snapshot(), self.headers.get("Accept", "")))
            elif path == "/health":
                status, body = health(snapshot())
                self._answer(status, "application/json", json.dumps(body).encode())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"there is /metrics and /health\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """A scrape every few seconds is nothing to tell."""

    return Handler


def _refusal(headers: Message, token: str | None) -> tuple[int, str] | None:
    """Status and reason for a request that gets no answer; None: it gets one.

    Without a token only names of this machine are answered: a web page elsewhere could read it through a name of its own that
    leads here. Ports are not compared, as one may be forwarded.
    """
    if token is not None:
        brought = headers.get("Authorization", "").encode(errors="replace")
        allowed = secrets.compare_digest(brought, bearer(token)["Authorization"].encode())
        return None if allowed else (401, "the token is missing or wrong\n")
    try:
        hostname = urlsplit(f"//{headers.get('Host', '')}").hostname or ""
    except ValueError:
        hostname = ""
    return None if is_loopback(hostname) else (403, "only under a name of this machine\n")


def _is_every_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host
