"""The frame of a server: what it counts, writes and says, and how it ends, around stand-ins of trainer, sampler and service."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from fastapi import FastAPI

from megarl.config import Config, parse_config
from megarl.errors import ConfigError, RunStopped, WorkerError
from megarl.observe.run_record import read_run
from megarl.options.serve import command
from megarl.options.serve.command import bound, load
from megarl.options.serve.figures import CountedSampler, CountedTrainer, ServerFigures
from megarl.options.serve.http_server import HttpServer
from megarl.options.serve.section import ServeConfig, serve_of
from megarl.options.serve.server_run import ServerRun
from megarl.options.serve.values import Answer, Datum, Loss, Passed, Sampled, SampleRequest


class Trainer:
    """Answers passes at once, until its ranks are gone."""

    gone = False

    def run_pass(self, model: str, data: Any, loss: Loss, *, backward: bool) -> Passed:
        if self.gone:
            raise WorkerError("rank 1 of policy is gone")
        return Passed([], {})


class Sampler:
    """Answers every request with three tokens."""

    closed = False

    async def sample(self, request: SampleRequest) -> Sampled:
        answer = Answer(np.zeros(3, np.int32), np.zeros(3, np.float32), "stop")
        return Sampled([answer] * request.num_samples)

    async def close(self) -> None:
        self.closed = True


class Service:
    """Notes that it was stopped before it was abandoned."""

    stopped = abandoned = False

    async def stop(self) -> None:
        self.stopped = not self.abandoned

    def abandon(self) -> None:
        self.abandoned = True


def datum(tokens: int) -> Datum:
    return Datum(np.zeros(tokens, np.int32), {})


def config_of(folder: Path, **sections: Any) -> Config:
    return parse_config({"model": {"path": "m"}, "serve": {}, "run": {"folder": str(folder)}} | sections)


def test_tokens_are_counted_by_tenant() -> None:
    figures = ServerFigures()
    figures.tenant_of = {"one": "ann", "two": "bob"}.__getitem__
    trainer = CountedTrainer(cast(Any, Trainer()), figures, lost=lambda error: None)
    trainer.run_pass("one", [datum(5), datum(7)], Loss("ppo"), backward=True)
    trainer.run_pass("two", [datum(2)], Loss("ppo"), backward=True)
    trainer.run_pass("two", [datum(100)], Loss("ppo"), backward=False)
    sampler = CountedSampler(cast(Any, Sampler()), figures)
    asyncio.run(sampler.sample(SampleRequest(np.zeros(4, np.int32), num_samples=2, tenant="ann")))
    assert figures.take(4.0) == {
        "serve/tokens_trained": 14,
        "serve/tokens_trained/ann": 12,
        "serve/tokens_trained/bob": 2,
        "serve/tokens_scored": 100,
        "serve/tokens_scored/bob": 100,
        "serve/tokens_sampled": 6,
        "serve/tokens_sampled/ann": 6,
        "serve/tokens_prompted": 4,
        "serve/tokens_prompted/ann": 4,
        "speed/tokens_per_s": 5.0,
        "time/step_s": 4.0,
    }
    assert figures.take(1.0) == {}


def test_a_minute_in_which_something_happens_is_a_row_and_a_server_goes_on_with_its_file(tmp_path: Path) -> None:
    for began, rows in ((0, 2), (2, 4)):
        run = ServerRun(config_of(tmp_path), say=lambda line: None)
        assert run.step == began
        run.figures.count("requests", 3)
        run.record()
        run.record()
        run.figures.wait("samples_waiting", 1, "ann")
        run.close(RunStopped("the server was told to stop"))
        record = read_run(tmp_path / "serve")
        assert [row["step"] for row in record.metrics] == list(range(1, rows + 1))
        assert record.metrics[-2]["serve/requests"] == 3
        assert record.metrics[-1]["serve/samples_waiting/ann"] == 1
        assert record.end == {"state": "interrupted", "why": "the server was told to stop"}


def test_prometheus_is_told_of_a_server(tmp_path: Path) -> None:
    run = ServerRun(config_of(tmp_path, trackers={"prometheus": {"port": 0}}), say=lambda line: None)
    [target] = json.loads((tmp_path / ".prometheus" / "serve.json").read_text())
    run.figures.count("tokens_trained", 11, "ann")
    run.record()
    with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    run.close(RunStopped("the server was told to stop"))
    assert 'megarl_serve_tokens_trained_ann{run="serve"} 11.0' in text


@contextmanager
def served(server: HttpServer, is_down: threading.Event, service: Service, sampler: Sampler) -> Iterator[tuple[str, list[Any]]]:
    """The address of a server in a thread, and what it raised."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.stop()

    app, raised = FastAPI(lifespan=lifespan), list[Any]()
    app.state.service = service

    @app.get("/hello")
    def hello() -> str:
        return "hello"

    def answer() -> None:
        try:
            asyncio.run(server.answer(app, sampler, listening))
        except Exception as error:
            raised.append(error)
        finally:
            is_down.set()

    with closing(bound(ServeConfig(port=0))) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", raised
        thread.join(30)
        assert not thread.is_alive()


def get(url: str, path: str) -> str:
    """The answer, once the server listens."""
    for _ in range(200):
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=10) as answer:
                return cast(str, json.loads(answer.read()))
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            threading.Event().wait(0.05)
    raise AssertionError("it does not listen")


def test_ranks_that_are_lost_end_the_server_before_its_clients_hear_of_it() -> None:
    figures, is_down, service, sampler, trainer = ServerFigures(), threading.Event(), Service(), Sampler(), Trainer()
    server = HttpServer(ServeConfig(), figures, is_down)
    counted = CountedTrainer(cast(Any, trainer), figures, server.lost)
    with served(server, is_down, service, sampler) as (url, raised):
        assert get(url, "/hello") == "hello"
        trainer.gone = True
        with pytest.raises(WorkerError, match="rank 1 of policy is gone"):
            counted.run_pass("one", [datum(1)], Loss("ppo"), backward=True)
        assert is_down.is_set(), "the trainer's caller goes on while clients can still be answered"
    assert [str(error) for error in raised] == ["rank 1 of policy is gone"]
    assert not service.stopped, "there are no ranks to take snapshots of"
    assert sampler.closed


def test_a_server_that_is_told_to_stop_keeps_models_first() -> None:
    figures, is_down, service, sampler = ServerFigures(), threading.Event(), Service(), Sampler()
    server = HttpServer(ServeConfig(), figures, is_down)
    with served(server, is_down, service, sampler) as (url, raised):
        assert get(url, "/hello") == "hello"
        with pytest.raises(urllib.error.HTTPError):
            get(url, "/nothing")
        server.stop()
    assert (raised, service.stopped, sampler.closed) == ([], True, True)
    assert figures.take(1.0)["serve/requests"] == 2


def test_a_taken_port_is_said_before_anything_is_loaded() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other, pytest.raises(ConfigError) as caught:
        bound(ServeConfig(port=other.getsockname()[1]))
    assert "cannot be listened on (Address already in use); choose another serve.port" in str(caught.value)


def test_a_server_that_starts_again_has_the_free_port_at_which_its_clients_look_for_it(tmp_path: Path) -> None:
    settings, kept = ServeConfig(port=0), tmp_path / "serve" / "port"
    with closing(bound(settings, kept)) as first:
        port = first.getsockname()[1]
        with closing(bound(settings)) as other:
            assert other.getsockname()[1] != port
    with closing(bound(settings, kept)) as again:
        assert again.getsockname()[1] == port
        again.listen()
        with closing(bound(settings, kept)) as elsewhere:  # another program has it
            taken = elsewhere.getsockname()[1]
            assert taken != port
    for damaged in ("", "70000", "none", "-1"):
        kept.write_text(damaged)
        with closing(bound(settings, kept)) as free:
            assert free.getsockname()[1] == int(kept.read_text())


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("none")
    settings = ServeConfig(tls_certificate=str(tmp_path / "a.pem"), tls_key=str(tmp_path / "b.pem"))
    server, app = HttpServer(settings, ServerFigures(), threading.Event()), FastAPI()
    app.state.service = Service()
    with closing(bound(ServeConfig(port=0))) as listening, pytest.raises(ConfigError, match="no certificate and its key"):
        asyncio.run(server.answer(app, Sampler(), listening))


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "tinker" else name)
    with pytest.raises(ConfigError, match=r"needs the package tinker, which is not installed: pip install 'megarl\[serve\]'"):
        load(tmp_path / "a.yaml")


def test_the_section_may_be_left_out_of_what_is_served(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {path: m}\n")
    config = load(tmp_path / "a.yaml", ["serve.port=9000"])
    assert load(tmp_path / "a.yaml").run.name == "serve"
    settings = serve_of(config)
    assert settings is not None
    assert (settings.port, settings.models) == (9000, {"m": None})
