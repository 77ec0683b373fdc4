"""`GET /metrics` and `GET /health` of a run that goes on, from a thread of the driver; see docs/watching.md.

It listens on this machine alone unless there is a token, takes nothing but GET, and whatever goes wrong in it is a line, never
the end of the run. A file says where it listens, as Prometheus' file discovery reads it.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megarl.config import AnyConfig
from megarl.errors import ConfigError
from megarl.observe.run_state import ENGINE_IS_UP, RunState, Snapshot
from megarl.options.telemetry.prometheus import exposition
from megarl.options.telemetry.section import trackers_of
from megarl.system.atomic_files import write_text_atomically
from megarl.system.bearer_tokens import is_loopback, read_token
from megarl.system.http_server import Admission, ServerThread, application, json_answer, listen
from megarl.system.path_names import file_name_of
from megarl.system.socket_names import NOTHING, SocketName

FIELD = "trackers.prometheus"
TOKEN_VARIABLE = "MEGARL_METRICS_TOKEN"
TARGETS = ".prometheus"
"""Folder in `run.folder` with a file per run that names its endpoint; the file is gone when the run ends by itself."""


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
        self._state, self._targets, self._said, self._one_at_a_time = state, targets, False, Lock()
        app = Admission(self._application(), token=token, is_open=token is None, most_bytes=0)
        self._server = ServerThread(app, listen(host, port), "metrics-endpoint", self._say_once)
        self.port = self._server.port
        self._name = SocketName(self.port, "metrics for Prometheus", "the token for metrics" if token is not None else NOTHING)
        shown = socket.gethostname() if _is_every_address(host) else host
        self.address = f"{f'[{shown}]' if ':' in shown else shown}:{self.port}"

    def announce(self) -> None:
        """Write where it listens, if that folder, which may be another user's, can be written to."""
        try:
            self._targets.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self._targets, json.dumps([{"targets": [self.address], "labels": {}}]) + "\n")
        except OSError as error:
            self._state.say(f"{self._targets} cannot be written ({error.strerror}): by it nobody finds {self.address}")

    def close(self) -> None:
        """Stop listening; the run has ended by itself."""
        self._server.close()
        self._name.close()
        with suppress(OSError):
            self._targets.unlink(missing_ok=True)

    def _application(self) -> Starlette:
        def metrics(request: Request) -> Response:
            kind, body = exposition(self._snapshot(), request.headers.get("accept", ""))
            return Response(body, headers={"Content-Type": kind, "Cache-Control": "no-store"})

        def tell_health(request: Request) -> Response:
            status, body = health(self._snapshot())
            return json_answer(body, status, {"Cache-Control": "no-store"})

        return application([Route("/metrics", metrics), Route("/health", tell_health)])

    def _snapshot(self) -> Snapshot:
        """The run's state.

        Raises:
            HTTPException: with status 500, whatever is the fault; the run goes on.
        """
        try:
            with self._one_at_a_time:
                return self._state.snapshot()
        except Exception as error:  # noqa: BLE001
            self._say_once(error)
            raise HTTPException(500, "the run's state cannot be told; the run says why") from None

    def _say_once(self, error: BaseException) -> None:
        if not self._said:
            self._said = True
            self._state.say(f"the endpoint for Prometheus failed ({type(error).__name__}: {error}); the run goes on")


def _is_every_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host
