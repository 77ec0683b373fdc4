"""What a run's endpoint serves is what the run knows, in Prometheus' format, to those who may ask; its failures end nothing."""

from __future__ import annotations

import http.client
import json
import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.observe import Phases
from megarl.observe.run_state import EngineStatus, GuardCounts, RunState
from megarl.options.telemetry.endpoint import TOKEN_VARIABLE, MetricsEndpoint, health, open_endpoint
from megarl.options.telemetry.prometheus import OF_THE_RUN, exposition, prometheus_name
from megarl.version import __version__
from tests.config import smallest
from tests.observe.documented import documented

TOKEN = "0123456789abcdef-token"
Make = Callable[..., RunState]


def config(folder: Path, **prometheus: Any) -> Config:
    return smallest.config(run={"folder": str(folder), "name": "r", "steps": 7}, trackers={"prometheus": prometheus})


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    """A run at its third step, at 1000 s: an engine is down, a rank is gone, a guard applied."""
    now = [900.0]
    (tmp_path / "r" / "checkpoints" / "step_000002").mkdir(parents=True)
    faults = [{"attempt": 1, "wait_s": 1.0}, {"attempt": 2, "wait_s": None}]
    lines = [*map(json.dumps, faults), "3", '{"attempt": 3, "why": {}']  # the last two are no faults
    (tmp_path / "r" / "faults.jsonl").write_text("\n".join(lines))
    run = RunState(config(tmp_path), clock=lambda: now[0])
    phases = Phases()
    phases.listen(run.phase_changed)
    run.log(0, {"eval/accuracy": 0.25})
    now[0] = 960.0
    run.log(3, {"reward/mean": 0.5, "policy/loss": math.nan, "kl/reference": -math.inf, "note": "text"})
    with phases("generate"):
        pass
    now[0] = 980.0
    run.phase_changed("update")
    now[0] = 1000.0
    run.engines = lambda: [EngineStatus(0, "up", 4, 2, 0), EngineStatus(1, "restarting", None, 0, 1)]
    run.ranks = {"policy": lambda: ["up", "gone"], "critic": lambda: []}
    run.guards = lambda: GuardCounts({"policy": 2}, 1, {"rollback if kl/reference above 1": 3})
    run.checkpoint = lambda: tmp_path / "r" / "checkpoints" / "step_000002"
    return run


@pytest.fixture
def serve(state: RunState, tmp_path: Path) -> Iterator[Callable[..., MetricsEndpoint]]:
    opened: list[MetricsEndpoint] = []

    def start(**settings: Any) -> MetricsEndpoint:
        endpoint = open_endpoint(config(tmp_path, port=0, **settings), state, is_continued=False)
        assert endpoint is not None
        opened.append(endpoint)
        return endpoint

    yield start
    for endpoint in opened:
        endpoint.close()


def ask(endpoint: MetricsEndpoint, path: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers["Content-Type"], answer.read().decode()


def series(text: str) -> dict[tuple[str, ...], float]:
    """By name and labels other than `run`, which is r in all."""
    found = {}
    for family in prometheus(text):
        for sample in family.samples:
            assert sample.labels["run"] == "r"
            key = (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "run"))
            assert key not in found
            found[key] = sample.value
    return found


def test_a_scrape_has_the_run_as_it_is(serve: Callable[..., MetricsEndpoint], tmp_path: Path) -> None:
    status, kind, text = ask(serve(), "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = series(text)
    assert math.isnan(found.pop(("megarl_policy_loss",)))
    written_at = (tmp_path / "r" / "checkpoints" / "step_000002").stat().st_mtime
    sizes = [found.pop((f"megarl_run_disk_{name}_bytes",)) for name in ("free", "size")]
    assert 0 < sizes[0] < sizes[1]
    assert found.pop(("megarl_run_info", "kind=rl", f"version={__version__}")) == 1
    states = {("restarting", "1"), ("up", "0")}
    for engine in ("0", "1"):
        for condition in ("up", "updating", "waiting", "asleep", "restarting", "dead"):
            value = found.pop(("megarl_engine_state", f"engine={engine}", f"state={condition}"))
            assert value == ((condition, engine) in states)
    assert found == {
        ("megarl_reward_mean",): 0.5,
        ("megarl_kl_reference",): -math.inf,
        ("megarl_eval_accuracy",): 0.25,
        ("megarl_run_step",): 3,
        ("megarl_run_steps_planned",): 7,
        ("megarl_run_start_timestamp_seconds",): 900,
        ("megarl_run_progress_timestamp_seconds",): 960,
        ("megarl_run_phase", "phase=generate"): 0,
        ("megarl_run_phase", "phase=update"): 1,
        ("megarl_run_phase_timestamp_seconds",): 980,
        ("megarl_run_restarts_total",): 1,
        ("megarl_run_checkpoint_step",): 2,
        ("megarl_run_checkpoint_timestamp_seconds",): written_at,
        ("megarl_run_skipped_updates_total", "role=policy"): 2,
        ("megarl_run_rollbacks_total",): 1,
        ("megarl_run_guards_applied_total", "guard=rollback if kl/reference above 1"): 3,
        ("megarl_engine_up", "engine=0"): 1,
        ("megarl_engine_up", "engine=1"): 0,
        ("megarl_engine_weight_version", "engine=0"): 4,
        ("megarl_engine_requests", "engine=0"): 2,
        ("megarl_engine_requests", "engine=1"): 0,
        ("megarl_engine_failures_total", "engine=0"): 0,
        ("megarl_engine_failures_total", "engine=1"): 1,
        ("megarl_ranks", "group=policy", "state=up"): 1,
        ("megarl_ranks", "group=policy", "state=silent"): 0,
        ("megarl_ranks", "group=policy", "state=gone"): 1,
    }


def test_a_scrape_by_a_new_prometheus_is_open_metrics(serve: Callable[..., MetricsEndpoint]) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
    status, kind, text = ask(serve(), "/metrics", Accept=accept)
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
    values = {sample.name: sample.value for family in openmetrics(text) for sample in family.samples}
    assert (values["megarl_reward_mean"], values["megarl_run_restarts_total"]) == (0.5, 1)


def test_metrics_of_an_earlier_step_are_gone_but_evaluations_stay(state: RunState) -> None:
    state.log(4, {"reward/mean": 0.75})
    assert state.snapshot().metrics == {"eval/accuracy": 0.25, "reward/mean": 0.75}
    state.log(5, {"eval/accuracy": 0.5})
    assert state.snapshot().metrics == {"eval/accuracy": 0.5}


def test_an_evaluation_before_training_is_no_progress(tmp_path: Path) -> None:
    now = [100.0]
    run = RunState(config(tmp_path), clock=lambda: now[0])
    run.begin_after(5)
    now[0] = 200.0
    run.log(0, {"eval/accuracy": 0.25})
    assert run.snapshot().progress_at == 100
    now[0] = 300.0
    run.log(6, {})
    assert (run.snapshot().progress_at, run.snapshot().step) == (300, 6)


def test_every_documented_metric_has_a_name_of_its_own() -> None:
    names = [name.replace(r"[\w.-]+", "x") for name in documented()]
    served = [prometheus_name(name) for name in names]
    assert len(names) > 100
    assert len(set(served)) == len(names)
    assert not [name for name in served if name.startswith(tuple(f"megarl_{part}_" for part in OF_THE_RUN))]


def test_of_two_metrics_with_one_name_the_first_is_served(state: RunState) -> None:
    state.log(4, {"own/a.b": 2.0, "own/a-b": 1.0, "run/step": 99.0, "engine/x": 99.0})
    found = series(exposition(state.snapshot(), "")[1].decode())
    assert found[("megarl_own_a_b",)] == 1.0
    assert found[("megarl_run_step",)] == 4
    assert ("megarl_engine_x",) not in found


def test_health_says_what_is_wrong(serve: Callable[..., MetricsEndpoint], state: RunState) -> None:
    status, kind, text = ask(serve(), "/health")
    body = json.loads(text)
    assert (status, kind) == (503, "application/json")
    assert (body["status"], body["why"]) == ("failing", ["rank 1 of policy is gone"])
    assert (body["step"], body["steps"], body["phase"]) == (3, 7, "update")
    assert (body["phase_seconds"], body["seconds_since_progress"]) == (20, 40)
    assert body["engines"][1] == {"number": 1, "condition": "restarting", "weight_version": None, "requests": 0, "failures": 1}
    now = replace(state.snapshot(), ranks={"policy": ["up", "up"]})
    assert health(now)[0] == 200  # an engine that is down is restarted while the others go on
    assert health(replace(now, engines=now.engines[1:]))[1]["why"] == ["no engine is up"]
    assert health(replace(now, ranks={"policy": ["up", "silent"]}))[0] == 503
    assert health(replace(now, engines=[], ranks={}))[0] == 200


def test_only_names_of_this_machine_are_answered_without_a_token(serve: Callable[..., MetricsEndpoint]) -> None:
    endpoint = serve()
    for host in (f"127.0.0.1:{endpoint.port}", "localhost:8000", "[::1]:1"):
        assert ask(endpoint, "/metrics", Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{endpoint.port}", "127.0.0.1.evil.example", "[", ""):
        for path in ("/metrics", "/health"):
            status, _, text = ask(endpoint, path, Host=host)
            assert (status, "reward" in text) == (403, False)
    assert ask(endpoint, "/../config.yaml")[0] == 404


def test_a_token_is_asked_of_every_request(
    serve: Callable[..., MetricsEndpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    endpoint = serve(token_file=str(tmp_path / "token"))
    for headers in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": "Bearer \xe9"}):
        for path in ("/metrics", "/health", "/"):
            assert ask(endpoint, path, **headers)[0] == 401
    assert ask(endpoint, "/metrics", Authorization=f"Bearer {TOKEN}", Host="a.cluster:9")[0] == 200
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert ask(serve(), "/metrics")[0] == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "node-7"])
def test_an_address_that_others_reach_needs_a_token(host: str, state: RunState, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trackers\.prometheus\.host is .*, which others can reach, so the endpoint needs a"):
        open_endpoint(config(tmp_path, port=0, host=host), state, is_continued=False)


def test_a_token_that_is_none_is_a_sentence(state: RunState, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("secret")
    for name, why in (("short", "must be at least 16 printable"), ("gone", "cannot be read")):
        with pytest.raises(ConfigError, match=rf"trackers\.prometheus\.token_file .*{name}.* {why}"):
            open_endpoint(config(tmp_path, port=0, token_file=str(tmp_path / name)), state, is_continued=False)


def test_an_endpoint_that_others_reach_is_served_with_a_token(serve: Callable[..., MetricsEndpoint], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    endpoint = serve(host="0.0.0.0", token_file=str(tmp_path / "token"))
    assert ask(endpoint, "/health", Authorization=f"Bearer {TOKEN}")[0] == 503
    endpoint.announce()
    [target] = json.loads((tmp_path / ".prometheus" / "r.json").read_text())
    assert target == {"targets": [f"{socket.gethostname()}:{endpoint.port}"], "labels": {}}
    endpoint.close()
    assert not (tmp_path / ".prometheus" / "r.json").exists()


def test_a_port_that_is_taken_stops_a_new_run_and_no_run_that_goes_on(state: RunState, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said: list[str] = []
        state.say = said.append
        sentence = rf"prometheus\.port is {port}, but 127\.0\.0\.1:{port} cannot be listened on: Address already in use; choose"
        with pytest.raises(ConfigError, match=sentence):
            open_endpoint(config(tmp_path, port=port), state, is_continued=False)
        assert open_endpoint(config(tmp_path, port=port), state, is_continued=True) is None
        assert said[0].endswith("; the run goes on without its endpoint")
    again = open_endpoint(config(tmp_path, port=port), state, is_continued=True)
    assert again is not None
    assert again.port == port
    again.close()


def test_a_folder_of_targets_that_cannot_be_written_is_a_line(
    serve: Callable[..., MetricsEndpoint], state: RunState, tmp_path: Path
) -> None:
    (tmp_path / ".prometheus").write_text("in the way, for root too")
    said: list[str] = []
    state.say = said.append
    endpoint = serve()
    endpoint.announce()
    assert said[0].startswith(f"{tmp_path}/.prometheus/r.json cannot be written (")
    assert ask(endpoint, "/metrics")[0] == 200


def test_what_cannot_be_found_out_is_left_out_and_said_once(serve: Callable[..., MetricsEndpoint], state: RunState) -> None:
    said: list[str] = []
    state.say = said.append

    def broken() -> list[EngineStatus]:
        raise RuntimeError("no loop")

    state.engines = broken
    endpoint = serve()
    for _ in range(3):
        status, _, text = ask(endpoint, "/metrics")
        assert (status, "megarl_engine" in text, "megarl_run_step" in text) == (200, False, True)
    assert said == ["the state of engines cannot be told to who watches: RuntimeError: no loop"]


def test_a_failure_inside_is_one_line_and_the_next_scrape_is_answered(
    serve: Callable[..., MetricsEndpoint], state: RunState, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    state.say = said.append
    endpoint, snapshot = serve(), state.snapshot

    def broken() -> Any:
        raise ValueError("a fault of megarl's")

    for _ in range(2):
        state.snapshot = broken  # type: ignore[method-assign]
        status, _, text = ask(endpoint, "/metrics")
        assert (status, "fault" in text) == (500, False)
        state.snapshot = snapshot  # type: ignore[method-assign]
        assert ask(endpoint, "/metrics")[0] == 200
    assert said == ["the endpoint for Prometheus failed (ValueError: a fault of megarl's); the run goes on"]
    assert capsys.readouterr().err == ""


def test_without_a_port_nothing_listens(state: RunState, tmp_path: Path) -> None:
    assert open_endpoint(config(tmp_path), state, is_continued=False) is None
