"""A server that lives for months has as much on disk and in memory as after one: what is over is forgotten in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megarl.options.serve import models, requests, sampling, service, worker
from megarl.options.serve.old_records import KEPT_S, forget_old
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.registry import SamplerRecord, ServedRun, SessionRecord
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import Tenant
from tests.options.serve.served import BASE, Served, serving
from tests.options.serve.test_bad_input import Http, body
from tests.options.serve.test_restart import Again

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
DAY_S = 86_400.0
ANNA = Tenant("anna")


def files_of(folder: Path) -> dict[str, int]:
    """Files of records by kind, and folders of runs and journals."""
    kinds = ("sessions", "training_runs", "samplers", "checkpoints", "journal", "scratch")
    return {kind: len([*(folder / kind).glob("*")]) for kind in kinds}


def add(store: CheckpointStore, number: int, created: float) -> str:
    session = f"s{number}"
    store.registry.sessions.add(SessionRecord(session, "anna", created, last_seen=created))
    store.registry.runs.add(ServedRun(f"{session}:train:0", "anna", created, session, "base"))
    store.registry.samplers.add(SamplerRecord(f"{session}:sample:0", "anna", created, session, "base"))
    return session


def test_what_is_old_is_forgotten_unless_it_lives_or_has_a_checkpoint(tmp_path: Path) -> None:
    now = [1_000_000.0]
    store = CheckpointStore(tmp_path, clock=lambda: now[0])
    for number in range(40):
        add(store, number, now[0] + number)
    path = CheckpointPath("s7:train:0", "weights", "kept")
    with store.writing(ANNA, path, {"base_model": "base"}) as folder:
        (folder / "file").write_text("x")
    store.registry.sessions.change("anna", "s9", status={"type": "cancelled"}, ended=now[0] + 1_000)
    now[0] += KEPT_S + 10.5  # those up to s10 are old
    live: dict[str, Any] = {"sessions": {"s3"}, "models": {"s3:train:0"}, "samplers": {"s3:sample:0"}}
    assert forget_old(store, **live) == ["s0", "s1", "s2", "s4", "s5", "s6", "s8", "s10"]
    assert forget_old(store, **live) == []
    there = CheckpointStore(tmp_path, clock=lambda: now[0]).registry
    names = {"s3", "s7", "s9", *(f"s{number}" for number in range(11, 40))}
    assert {session.id for session in there.sessions.all()} == names == {found.id for found in store.registry.sessions.all()}
    assert {run.session for run in there.runs.all()} == names - {"s9"}
    assert {sampler.session for sampler in there.samplers.all()} == names - {"s7", "s9"}
    store.delete("anna", path)
    assert forget_old(store, **live) == ["s7"]
    assert not [*(tmp_path / "checkpoints").iterdir()]


def test_a_record_that_is_forgotten_is_not_written_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    session = add(store, 1, 5.0)
    store.registry.sessions.touch("anna", session, 6.0)
    assert forget_old(store, sessions=(), models=(), samplers=()) == [session]
    store.sweep()
    assert files_of(tmp_path)["sessions"] == 0


class Clock:
    """The modules' `time`, some of it ahead."""

    ahead_s = 0.0

    def time(self) -> float:
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (models, requests, sampling, service, worker):
        monkeypatch.setattr(module, "time", clock)
    return clock


def set_clock(served: Served, clock: Clock) -> None:
    served.service.store.clock = clock.time
    served.service.promises._clock = clock.monotonic


def pass_time(served: Served, clock: Clock, seconds: float, *alive: Http) -> None:
    """Let time pass, with what the server does from time to time."""
    for part in (0.5 * 3_600, 3_600, 25 * 3_600, seconds - 26.5 * 3_600):
        clock.ahead_s += part
        for http in alive:
            assert http.post("session_heartbeat", session_id=http.session).status_code == 200
        served.call(served.service.watch)
        ends_at = time.monotonic() + 60
        while served.call(lambda: len(served.service.models._ending) + len(served.service.samplers._tasks)):
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        served.service.store.sweep()
        served.run(served.service.forget_old())


def sampled(http: Http, sampler: str, seq: int) -> Any:
    prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    return http.post("asample", sampling_session_id=sampler, seq_id=seq, prompt=prompt, sampling_params={"max_tokens": 2})


def come_and_go(served: Served, number: int) -> Http:
    """A client that trains a model and samples; every other one says goodbye, and the others are killed."""
    http = Http(served)
    model = http.model()
    http.answer(http.send(body(model, 1)))
    http.answer(http.step(model, 2, learning_rate=0.05))
    http.answer(http.post("save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0))
    base = http.post("create_sampling_session", session_id=http.session, sampling_session_seq_id=1, base_model=BASE).json()
    http.answer(sampled(http, base["sampling_session_id"], 0))
    if number == 0:
        http.answer(http.post("save_weights", model_id=model, seq_id=4, path="kept"))
    if number % 2:
        assert http.post(f"sessions/{http.session}/finish", reason={"type": "success"}).status_code == 200
    return http


def test_a_server_that_lives_for_months_has_no_more_than_after_one(tmp_path: Path, clock: Clock) -> None:
    counts, in_memory = [], []
    with serving(tmp_path) as served:
        set_clock(served, clock)
        alive = Http(served)
        model = alive.model()
        first = None
        for number in range(8):
            gone = come_and_go(served, number)
            first = first or gone
            passed = alive.post("save_weights_for_sampler", model_id=model, seq_id=number + 1, sampling_session_seq_id=number)
            alive.answer(sampled(alive, alive.answer(passed)["sampling_session_id"], 0))
            pass_time(served, clock, 10 * DAY_S, alive)
            counts.append(files_of(tmp_path))
            registry = served.service.store.registry
            held = (registry.sessions.all(), registry.runs.all(), registry.samplers.all(), served.service.samplers.sessions)
            in_memory.append([len(kept) for kept in held])
        assert counts[7] == counts[5], counts
        assert in_memory[7] == in_memory[5], in_memory
        assert counts[7]["sessions"] <= 2 + 4, "the one with a checkpoint, the one that is alive, and those of a month"
        assert counts[7]["samplers"] <= 2 * 4 + 1
        assert counts[7]["journal"] == 1
        assert in_memory[7][3] <= 2, "a client that goes on has no more samplers than it uses"
        assert first is not None
        assert first.session in {session.id for session in registry.sessions.all()}
        lost = come_and_go(served, 2)
        pass_time(served, clock, 25 * DAY_S, alive)
        answer = lost.post("session_heartbeat", session_id=lost.session)
        assert (answer.status_code, "weights/idle-000003" in answer.text) == (410, True), "all the time that it is kept"
        step = alive.step(model, 9, learning_rate=0.05)
        said = alive.answer(step)
        clock.ahead_s += 500
        served.call(served.service.watch)
        served.run(served.service.forget_old())
        assert alive.answer(alive.step(model, 9, learning_rate=0.05)) == said, "a late retry is answered"
    with serving(tmp_path) as served:
        set_clock(served, clock)
        again = Again(served, alive)
        assert again.answer(again.step(model, 10, learning_rate=0.05))["type"] == "optim_step"
        pass_time(served, clock, 40 * DAY_S)
        pass_time(served, clock, 40 * DAY_S)
        found = files_of(tmp_path)
        assert (found["sessions"], found["training_runs"], found["checkpoints"]) == (1, 1, 1), "what has a checkpoint stays"
        assert (found["journal"], found["samplers"], found["scratch"]) == (0, 0, 0)
