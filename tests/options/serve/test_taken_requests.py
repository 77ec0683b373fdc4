"""A request that was taken is done, whatever happens to the server: clients do not send training requests again."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from megarl.errors import WorkerError
from megarl.options.serve.custom_graph import read_graph
from megarl.options.serve.journal import RequestJournal
from tests.options.serve.reference import ReferenceTrainer
from tests.options.serve.served import BASE, serving
from tests.options.serve.test_bad_input import Http, body
from tests.options.serve.test_restart import Again

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


def asked(http: Http, model: str) -> list[Any]:
    """Requests of every kind, sent and not waited for."""
    return [
        http.send(body(model, 1)),
        http.step(model, 2, learning_rate=0.05),
        http.post("save_weights", model_id=model, seq_id=3, path="kept"),
        http.post("save_weights_for_sampler", model_id=model, seq_id=4, sampling_session_seq_id=0),
        http.post("load_weights", model_id=model, seq_id=5, path=f"tinker://{model}/weights/kept", optimizer=True),
        http.step(model, 6, no_such_field=1),
        http.send(body(model, 7, 5)),
        http.step(model, 8, learning_rate=0.05),
    ]


def test_requests_that_wait_in_a_server_that_is_killed_are_done_by_the_next_one(tmp_path: Path) -> None:
    with serving(tmp_path / "whole") as served:
        http = Http(served)
        model = http.model(seed=7)
        expected = [http.answer(future) for future in asked(http, model)]
    with serving(tmp_path / "cut", crash=True) as served:
        before = Http(served)
        model_of_cut = before.model(seed=7)
        served.trainer.gate.clear()  # nothing is computed
        futures = asked(before, model_of_cut)
        late = before.send(body(model_of_cut, 10))  # the one before it did not come
        served.service._stopped = True
        served.service.worker._queue = type(served.service.worker._queue)()
    with serving(tmp_path / "cut") as served:
        http = Again(served, before)
        answers = [http.answer(future) for future in futures]
        assert [plain(answer, model_of_cut) for answer in answers] == [plain(answer, model) for answer in expected]
        assert http.answer(http.step(model_of_cut, 9)) == {"metrics": {"grad_norm": 0.0}, "type": "optim_step"}
        assert isinstance(http.answer(late), bytes)


def plain(answer: Any, model: str) -> Any:
    """An answer without the ids of its model and session."""
    return answer if isinstance(answer, bytes) else repr(answer).replace(model, "MODEL").replace(model.split(":")[0], "SESSION")


def test_a_model_that_was_asked_for_is_made_by_the_next_server(tmp_path: Path) -> None:
    with serving(tmp_path, crash=True) as served:
        before = Http(served)
        done = threading.Event()
        served.trainer.create = lambda model, choice: done.wait(30)  # type: ignore[method-assign,assignment]
        made = before.post(
            "create_model", session_id=before.session, model_seq_id=0, base_model=BASE, lora_config={"rank": 2, "seed": 1}
        )
        passed = before.send(body(made.json()["model_id"], 1))
        served.service._stopped = True
        served.service.worker._queue = type(served.service.worker._queue)()
        served.trainer.create = lost  # type: ignore[method-assign]
        done.set()
    with serving(tmp_path) as served:
        http = Again(served, before)
        assert http.answer(made)["model_id"] == made.json()["model_id"]
        assert isinstance(http.answer(passed), bytes)


def lost(*arguments: Any, **options: Any) -> None:
    raise WorkerError("the ranks are gone")


@pytest.mark.parametrize("method", ["run_pass", "optimizer_step", "save", "export"])
def test_a_client_hears_nothing_of_ranks_that_are_lost(tmp_path: Path, method: str) -> None:
    with serving(tmp_path, crash=True) as served:
        before = Http(served)
        model = before.model(seed=7)
        setattr(served.trainer, method, lost)
        futures = asked(before, model)[:4]
        time.sleep(0.5)
    with serving(tmp_path) as served:
        http = Again(served, before)
        answers = [http.answer(future) for future in futures]
        assert not any("error" in answer for answer in answers if isinstance(answer, dict)), answers


def test_a_journal_that_cannot_be_written_is_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as served:
        http = Http(served)
        model = http.model(seed=7)
        append, fails = RequestJournal.append, [1, 1]

        def failing(*arguments: Any) -> None:
            if fails:
                fails.pop()
                raise OSError(28, "No space left on device")
            append(*arguments)

        monkeypatch.setattr(RequestJournal, "append", failing)
        for _ in range(2):
            refused = http.send(body(model, 1))
            assert (refused.status_code, refused.json()["error"]) == (
                503,
                "the server cannot write down the request now; ask again",
            )
        assert isinstance(http.answer(http.send(body(model, 1))), bytes)


def test_weights_that_were_passed_on_without_an_answer_are_passed_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed between the note beside the weights and the journal's answer."""
    with serving(tmp_path, crash=True) as served:
        before = Http(served)
        model = before.model(seed=7)
        append = RequestJournal.append

        def stopped(self: RequestJournal, name: str, seq: int, kind: str, content: bytes) -> None:
            if kind.startswith("answer"):
                raise WorkerError("killed")
            append(self, name, seq, kind, content)

        monkeypatch.setattr(RequestJournal, "append", stopped)
        passed = before.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
        time.sleep(0.5)
        monkeypatch.setattr(RequestJournal, "append", append)
    with serving(tmp_path) as served:
        http = Again(served, before)
        sampler = http.answer(passed)["sampling_session_id"]
        prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
        asked = http.post("asample", sampling_session_id=sampler, seq_id=0, prompt=prompt, sampling_params={"max_tokens": 2})
        assert isinstance(http.answer(asked), bytes)
        joined = http.post("join_sampling_session", sampling_session_id=sampler).json()["client_counter"]
        assert joined > 1, "clones of the server before have the first numbers"


def test_weights_that_are_passed_on_are_known_where_the_client_counts_its_session_anew(tmp_path: Path) -> None:
    """The package does so when it asks again, where the connection broke under its request."""
    with serving(tmp_path) as served:
        http = Http(served)
        model = http.model(seed=7)
        sent = [
            http.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=number) for number in (0, 1)
        ]
        first, again = (http.answer(future) for future in sent)
        assert first == again == {"sampling_session_id": f"{http.session}:sample:0", "type": "save_weights_for_sampler"}
        assert [call[0] for call in served.trainer.calls if call[1] == model] == ["create", "export"]
        other = http.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=1, ttl_seconds=4_000)
        assert "came before with other content" in http.answer(other)["error"]


def squared(logprobs: Any, weights: Any) -> Any:
    loss = (logprobs * logprobs * weights).sum()
    return loss, {"custom/squared:sum": loss}


def test_losses_that_clients_define_are_there_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    tokens = types.ModelInput.from_ints([1, 2, 3])
    row = types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 0.5, 1.0]})
    with serving(tmp_path, crash=True, read_graph=read_graph, trainer=CustomTrainer()) as served:
        client = served.client()
        training = client.create_lora_training_client(base_model=BASE, rank=2, seed=1).result()
        handle = client.create_custom_loss(squared, input_ranks={"logprobs": 1, "weights": 1}).result()
        training.forward_backward_custom([row], handle).result()
        calls, loss = served.trainer.calls, handle.loss_id
        session = training.model_id.split(":")[0]
    trainer = CustomTrainer()
    with serving(tmp_path, read_graph=read_graph, trainer=trainer) as served:
        until(lambda: ("backward", training.model_id, 1) in trainer.calls)
        assert calls[-1] == trainer.calls[-1] == ("backward", training.model_id, 1)
        assert served.service.losses.find(str(loss), session) is not None
        served.call(served.service.losses.end_session, session)
    with (
        serving(tmp_path, read_graph=read_graph, trainer=CustomTrainer()) as served,
        pytest.raises(Exception, match="does not"),
    ):
        served.service.losses.find(str(loss), session)


class CustomTrainer(ReferenceTrainer):
    """Takes a loss of a graph for cross-entropy: what is computed is no part of the test."""

    def run_pass(self, model: str, data: Any, loss: Any, *, backward: bool) -> Any:
        assert loss.graph is not None
        return super().run_pass(model, data, type(loss)("cross_entropy"), backward=backward)


def until(condition: Any) -> None:
    ends_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def test_models_of_a_session_that_is_over_are_forgotten_where_the_server_before_did_not_come_to_it(tmp_path: Path) -> None:
    with serving(tmp_path, crash=True) as served:
        http = Http(served)
        model = http.model(seed=7)
        sessions = served.service.store.registry.sessions
        served.call(lambda: sessions.change("local", http.session, status={"type": "client_finished"}))
    with serving(tmp_path) as served:
        assert model not in served.service.models.models
        assert RequestJournal(tmp_path / "journal").models() == []
