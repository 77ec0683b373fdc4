"""The HTTP servers of megarl, each on a real socket, and a client of raw bytes to attack them with."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.observe.live import open_server
from megarl.observe.run_state import RunState
from megarl.rewards import build_rewards
from megarl.rewards.server import make_app
from megarl.system.http_server import ServerThread, listen
from tests.config import smallest
from tests.observe.recorded import write_run

TOKEN = "0123456789abcdef-token"
INSIDES = re.compile(rb"Traceback|File \"|\.py\b|uvicorn|starlette|root:x:|line \d+, in")
"""What no answer may hold."""


@dataclass
class Answer:
    """What came back; status 0: nothing did, and the connection was closed."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Target:
    """A server: a request that it answers, one that a body can be posted by, and what a client shows."""

    port: int
    good: str
    """Path that is answered with 200 or 503."""
    secret: dict[str, str] = field(default_factory=dict)
    post: str | None = None
    """Path that takes a JSON body; None: the server takes none."""
    body: bytes = b""
    """A body that `post` answers with 200."""
    large: str | None = None
    """Path that takes the largest JSON bodies, where that is another one."""
    most_bytes: int = 0
    """Of a body on it."""
    is_open: bool = False
    """Whether it answers a client that shows nothing secret, and so has to keep web pages out."""

    def request(self, method: str, path: str, body: bytes | None = None, /, **changed: str | None) -> bytes:
        """A request's bytes; `changed` headers, by names with `_` for `-`, are left out where they are None."""
        headers: dict[str, str | None] = {"host": f"127.0.0.1:{self.port}", **{k.lower(): v for k, v in self.secret.items()}}
        if body is not None:
            headers |= {"content-type": "application/json", "content-length": str(len(body))}
        headers |= {name.replace("_", "-"): value for name, value in changed.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items() if value is not None)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")

    def posted(self, body: bytes, /, **changed: str | None) -> Answer:
        """What a body is answered with, on `post` or on the path of `good`; a large one on `large`."""
        path = self.large if self.large and len(body) > 1 << 20 else self.post or self.good
        return self.talk(self.request("POST", path, body, **changed))

    def stranger(self) -> dict[str, None]:
        """Changes of a request that take away what is secret in it."""
        return {name.lower().replace("-", "_"): None for name in self.secret}

    def connect(self, timeout_s: float = 20.0) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout_s)

    def talk(self, data: bytes, method: str = "POST") -> Answer:
        """Send bytes and read an answer; none may tell of the server's insides."""
        with self.connect() as connection:
            with suppress(ConnectionError):  # the server may answer before it has all
                connection.sendall(data)
            return answer_on(connection, method)

    def is_served(self) -> None:
        """Ask as a good client does."""
        answer = self.talk(self.request("GET", self.good), "GET")
        assert answer.status in (200, 503), answer
        assert answer.body


def answer_on(connection: socket.socket, method: str = "POST") -> Answer:
    """Read an answer."""
    try:
        answer = http.client.HTTPResponse(connection, method=method)
        answer.begin()
        found = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    except (http.client.HTTPException, ConnectionError):
        return Answer(0)
    assert not INSIDES.search(found.body), found.body
    assert "server" not in found.headers
    return found


def is_closed(connection: socket.socket, within_s: float) -> bool:
    """Whether the server closes the connection in that time; what it sends before is read."""
    connection.settimeout(within_s)
    ends_at = time.monotonic() + within_s
    try:
        while time.monotonic() < ends_at:
            if not connection.recv(1 << 16):
                return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


@contextmanager
def good_client(target: Target) -> Iterator[list[float]]:
    """Ask over and over as long as the block runs, and once behind it.

    Gives for each answer the CPU seconds that the server, which is in this process, worked before the client had it: all but
    those of the thread that runs the block. What else the machine does adds nothing to them.
    """
    took: list[float] = []
    attacker = time.pthread_getcpuclockid(threading.get_ident())
    failed: list[BaseException] = []
    is_over = threading.Event()

    def worked() -> float:
        return time.process_time() - time.clock_gettime(attacker)

    def ask_once() -> None:
        before = worked()
        target.is_served()
        took.append(worked() - before)

    def ask() -> None:
        while not is_over.wait(0.05):
            try:
                ask_once()
            except BaseException as error:
                failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield took
    finally:
        is_over.set()
        asking.join(60)
    assert not failed, failed
    ask_once()


# the servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def rewards(folder: Path, token: str | None = None) -> Iterator[Target]:
    """The reward server."""
    data = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))
    app = make_app(build_rewards([RewardConfig(name="exact_number")], data), token=token)
    server = ServerThread(app, listen("127.0.0.1", 0), "rewards")
    body = json.dumps({"query": ["p 1"], "prompts": ["p "], "labels": ["1"]}).encode()
    secret = {"Authorization": f"Bearer {token}"} if token else {}
    yield Target(server.port, "/health", secret, "/get_reward", body, None, 256 << 20, is_open=token is None)
    server.close()


@contextmanager
def rewards_with_token(folder: Path) -> Iterator[Target]:
    """The reward server for those who bring a token."""
    with rewards(folder, TOKEN) as target:
        yield target


@contextmanager
def agents(folder: Path) -> Iterator[Target]:
    """The endpoint of agents, with an episode."""
    pytest.importorskip("megarl.options.agents")  # an option may be deleted
    from megarl.options.agents.server import SessionServer
    from megarl.options.agents.session import AgentSession, SessionLimits
    from tests.options.agents.test_sessions import Recorder, template

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    sampler: Any = Recorder()

    async def session() -> AgentSession:
        return AgentSession(SessionLimits(10**6, 10**6, 10**6), sampler, template, Counter())

    server = SessionServer(["policy"])
    key = server.open(asyncio.run_coroutine_threadsafe(session(), loop).result(30))
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}]}).encode()
    yield Target(server.port, "/v1/models", {"Authorization": f"Bearer {key}"}, "/v1/chat/completions", body, None, 64 << 20)
    server.close()
    loop.call_soon_threadsafe(loop.stop)


@contextmanager
def metrics(folder: Path) -> Iterator[Target]:
    """The endpoint for Prometheus."""
    pytest.importorskip("megarl.options.telemetry")
    from megarl.options.telemetry.endpoint import MetricsEndpoint

    (folder / "r").mkdir()
    state = RunState(smallest.config(run={"folder": str(folder), "name": "r", "steps": 7}))
    state.log(3, {"reward/mean": 0.5})
    endpoint = MetricsEndpoint(state, "127.0.0.1", 0, None, folder / "targets.json")
    yield Target(endpoint.port, "/metrics", is_open=True)
    endpoint.close()


@contextmanager
def report(folder: Path) -> Iterator[Target]:
    """`report --watch`."""
    server = open_server([write_run(folder / "r", steps=5)], 0)
    yield Target(server.port, "/rows?at=0.0", is_open=True)
    server.close()


@contextmanager
def serve(folder: Path) -> Iterator[Target]:
    """`megarl serve`, without tenants."""
    pytest.importorskip("megarl.options.serve")
    from tests.options.serve.served import KEY, serving

    with serving(folder) as served:
        port = int(served.url.rpartition(":")[2])
        body = json.dumps({"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}).encode()
        post, large = "/api/v1/create_session", "/api/v1/asample"
        yield Target(port, "/api/v1/healthz", {"X-API-Key": KEY}, post, body, large, 64 << 20, is_open=True)


@contextmanager
def sites(folder: Path) -> Iterator[Target]:
    """Where engines of other sites join a run, with one that has."""
    pytest.importorskip("megarl.options.elastic_engines")
    from megarl.options.elastic_engines.section import SitesConfig
    from megarl.options.elastic_engines.sites.far_engine import FarEngine
    from megarl.options.elastic_engines.sites.gate import Gate
    from megarl.options.elastic_engines.sites.weight_store import WeightStore
    from megarl.options.elastic_engines.sites.wire import Joining, ModelFacts, SiteFacts

    class Members:
        life, store = "1", WeightStore(folder / "weights")
        engine = FarEngine(Joining("1", ModelFacts("", "", ""), "site-b"))

        def facts(self) -> SiteFacts:
            return SiteFacts("1", ModelFacts("a", "b", "c"), "m", "embedded", {}, 1)

        def ask_to_join(self, engine: FarEngine) -> None:
            raise AssertionError("no stranger gets here")

        def of(self, key: str) -> FarEngine | None:
            return self.engine if key == self.engine.key else None

        def refused(self, key: str) -> str | None:
            return None

    gate = Gate(Members(), SitesConfig(port=0), TOKEN, 16 << 20, print)
    body = json.dumps({"key": Members.engine.key}).encode()
    yield Target(gate.port, "/site", {"Authorization": f"Bearer {TOKEN}"}, "/leave", body, "/answer", 16 << 20)
    gate.close()


SERVERS: list[Callable[[Path], object]] = [rewards, rewards_with_token, agents, metrics, report, serve, sites]
