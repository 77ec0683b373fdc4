"""What clients leave behind is forgotten in time: models of sessions that went silent, answers, bytes in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import torch

from megarl.options.serve.futures import PROMISE_BYTES, Promises
from megarl.options.serve.registry import IDLE
from megarl.options.serve.tenants import HeldBytes, Tenant
from megarl.options.serve.values import RequestError
from tests.options.serve.served import BASE, Served, serving
from tests.options.serve.test_bad_input import Http
from tests.options.serve.test_restart import Again
from tests.options.serve.test_tenants import file_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def silence(served: Served, session: str, seconds: float) -> None:
    """Have a session and its models be as if nothing had come from its client for so long."""

    def change() -> None:
        service = served.service
        for seen in (service._seen, service._idle):
            if session in seen:
                seen[session] -= seconds
        for model in service.models.models.values():
            if model.session == session:
                model.used -= seconds
        service.watch()

    served.call(change)


def await_checkpoint(http: Http, path: str) -> None:
    """Wait until a client's tenant has a checkpoint."""
    deadline = time.monotonic() + 60
    while path not in http._http.get("checkpoints").text:
        assert time.monotonic() < deadline, f"{path} was not kept"
        time.sleep(0.02)


def test_models_of_a_client_that_was_killed_are_kept_for_a_day_and_then_dropped(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        gone, there = Http(served), Http(served)
        lost, kept = gone.model(), there.model()
        silence(served, gone.session, 3_600)
        assert isinstance(gone.answer(gone.step(lost, 1)), dict), "it is back after an hour"
        silence(served, gone.session, 90_000)
        answer = gone.step(lost, 2)
        assert (answer.status_code, "its client was not heard of for 90000 s" in answer.text) == (410, True), answer.text
        assert there.answer(there.step(kept, 1))["type"] == "optim_step"
        assert ("drop", lost) in served.trainer.calls
        served.call(served.service.models.forget_lost, -1.0)
        assert lost not in served.service.models.models
        assert gone.step(lost, 2).status_code == 410
    with serving(tmp_path) as served:
        http = Again(served, there)
        assert [*served.service.models.models] == [kept]
        assert http.answer(http.step(kept, 2))["type"] == "optim_step"


def test_a_session_that_a_killed_server_had_ended_is_ended_behind_what_its_model_has_to_do_again(tmp_path: Path) -> None:
    with serving(tmp_path, snapshot_every_s=1e9, crash=True) as served:
        http = Http(served)
        model = http.model()
        http.answer(http.step(model, 1))
        weights = served.trainer.models[model].parameters()
        expected = {name: parameter.detach().clone() for name, parameter in weights.items()}
        sessions = served.service.store.registry.sessions
        status = {"type": IDLE, "detail": f"session {http.session} is over"}
        served.call(lambda: sessions.change("local", http.session, status=status))
    with serving(tmp_path) as served:
        again = Again(served, http)
        other = Http(served)
        answer = again.step(model, 2)
        assert answer.status_code == 410
        path = f"tinker://{model}/weights/idle-000001"
        await_checkpoint(other, path)
        made = other.post("load_weights", session_id=other.session, model_seq_id=0, path=path, optimizer=True)
        loaded = served.trainer.models[other.answer(made)["model_id"]].parameters()
        assert expected.keys() == loaded.keys()
        assert all(torch.equal(expected[name], parameter.detach()) for name, parameter in loaded.items())


def test_a_tenant_s_forgotten_models_make_room_for_new_ones_and_no_others_do(tmp_path: Path) -> None:
    """Of its idle sessions that of the longest silence ends, what it has learnt is kept, and another tenant's stays."""
    path, keys = file_of(tmp_path, "anna", "ben")
    path.write_text(path.read_text().replace("anna:\n", "anna:\n  models: 3\n"))
    with serving(tmp_path / "served", tenants=path) as served:
        first, second, third = (Http(served, keys["anna"]) for _ in range(3))
        other = Http(served, keys["ben"])
        idle, forgotten, alive, of_ben = first.model(), second.model(), third.model(), other.model()
        second.answer(second.step(forgotten, 1))
        lora = {"rank": 2}
        refused = third.post("create_model", session_id=third.session, model_seq_id=1, base_model=BASE, lora_config=lora)
        assert "tenant anna has 3 models, and its quota is 3" in third.answer(refused)["error"], "no client is gone"
        for http, seconds in ((other, 7_200), (second, 3_600), (first, 2_000)):
            silence(served, http.session, seconds)
        fourth = Http(served, keys["anna"])
        made = fourth.model()
        kept = f"tinker://{forgotten}/weights/idle-000001"
        answer = second.step(forgotten, 2)
        assert answer.status_code == 410
        assert f"its models are kept as {kept}" in answer.json()["error"]
        await_checkpoint(fourth, kept)
        for http, model in ((fourth, made), (third, alive), (first, idle), (other, of_ben)):
            assert http.answer(http.step(model, 1))["type"] == "optim_step"


def test_weights_of_a_model_that_is_unloaded_while_engines_load_them_are_dropped_in_time(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        http, samplers = Http(served), served.service.samplers
        model = http.model()
        loading, may_load, add = threading.Event(), threading.Event(), served.sampler.add

        async def late(adapter: str, folder: Path) -> None:
            loading.set()
            await asyncio.to_thread(may_load.wait, 60)
            await add(adapter, folder)

        served.sampler.add = late  # type: ignore[method-assign]
        passed = http.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
        assert loading.wait(60)
        http.answer(http.post("unload_model", model_id=model))
        may_load.set()
        session = samplers.sessions[http.answer(passed)["sampling_session_id"]]
        session.used -= 10_000
        served.call(samplers.expire)
        assert "has expired" in session.over


def test_answers_that_nobody_polls_for_in_bulk_are_nowhere_once_they_are_forgotten() -> None:
    now = [0.0]
    promises = Promises(keep_fetched_s=10, clock=lambda: now[0])
    for number in range(100):
        promise = promises.make(f"s:{number}", "anna", b"", target=("s", 0))
        promises.keep(promise, b"x" * 1000)
        promise.fetched = now[0]
    now[0] = 11.0
    promises.expire()
    assert not promises._promises
    assert not promises._queues["s", 0].events
    assert promises._bytes == 0


def test_a_tenant_with_too_many_answers_loses_its_own() -> None:
    promises = Promises(keep_bytes=100 * (PROMISE_BYTES + 1000), clock=time.monotonic)
    for number in range(10):
        promises.keep(promises.make(f"ben:{number}", "ben", b""), b"x" * 1000)
    for number in range(500):
        promises.keep(promises.make(f"anna:{number}", "anna", b""), b"x" * 1000)
    promises.expire()
    assert all(promises.known(f"ben:{number}") for number in range(10))
    assert promises.known("anna:0") is None
    assert promises.known("anna:499") is not None


def test_bytes_that_a_tenant_has_in_memory_are_bounded_and_another_tenant_s_are_not_counted() -> None:
    held, anna, ben = HeldBytes(100), Tenant("anna"), Tenant("ben")
    free = held.take(anna, 500)  # one alone may have more
    with pytest.raises(RequestError, match="requests of anna with 500 bytes wait already") as raised:
        held.take(anna, 1)
    assert raised.value.status == 429
    held.take(ben, 60)()
    free()
    held.take(anna, 60)
    with pytest.raises(RequestError):
        held.take(anna, 41)
    assert not {"ben"} & held._held.keys()
