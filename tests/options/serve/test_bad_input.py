"""What clients do wrong is one sentence of the API; nothing is lost by it, and no other client notices."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import zstandard
from tinker import types
from tinker.proto import request_conv

from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.tenants import new_key
from tests.options.serve.served import BASE, KEY, Served, serving

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
MOST_BODY = 1 << 20
PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        with serving(tmp_path_factory.mktemp("bad"), max_body_bytes=MOST_BODY) as served:
            yield served


class Http:
    """Requests as they are, with the answers that their futures have."""

    def __init__(self, served: Served, key: str = KEY) -> None:
        self._http = httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": key}, timeout=60)
        self.session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0").json()["session_id"]

    def post(self, name: str, **body: Any) -> httpx.Response:
        return self._http.post(name, json=body)

    def send(self, body: bytes, **headers: str) -> httpx.Response:
        return self._http.post("forward_backward", content=body, headers={**PROTOBUF, **headers})

    def answer(self, response: httpx.Response) -> Any:
        """What a future answers in the end."""
        assert response.status_code == 200, response.text
        while (got := self.post("retrieve_future", request_id=response.json()["request_id"])).status_code == 408:
            pass
        assert got.status_code == 200, got.text
        return got.json() if got.headers["content-type"] == "application/json" else got.content

    def model(self, number: int = 0, **lora: Any) -> str:
        adapters = {"rank": 2, "seed": 1, **lora}
        made = self.post("create_model", session_id=self.session, model_seq_id=number, base_model=BASE, lora_config=adapters)
        return str(self.answer(made)["model_id"])

    def step(self, model: str, seq: int, **adam: Any) -> httpx.Response:
        return self.post("optim_step", model_id=model, seq_id=seq, adam_params=adam)


def body(model: str, seq: int, tokens: int = 4, loss: str = "cross_entropy", **inputs: Any) -> bytes:
    """A pass as the client packs it."""
    given = {"target_tokens": np.arange(tokens), **inputs}
    datum = types.Datum(model_input=types.ModelInput.from_ints(list(range(tokens))), loss_fn_inputs=given)
    sent = types.ForwardBackwardInput(data=[datum], loss_fn=loss)  # type: ignore[arg-type]
    request = types.ForwardBackwardRequest(forward_backward_input=sent, model_id=model, seq_id=seq)
    return request_conv.forward_backward_request_to_proto(request).SerializeToString()


@pytest.fixture
def http(served: Served) -> Http:
    return Http(served)


def test_requests_that_arrive_out_of_order_take_effect_in_order(served: Served, http: Http) -> None:
    model = http.model()
    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(http.step, model, seq, learning_rate=0.1 * seq) for seq in (4, 3, 5, 2)]
        futures = [item.result() for item in sent]
        time.sleep(0.1)
        assert ("step", model) not in served.trainer.calls
        passed = http.send(body(model, 1))
    assert isinstance(http.answer(passed), bytes)
    assert [http.answer(future)["metrics"]["grad_norm"] > 0 for future in futures] == [False, False, False, True]
    assert [call[0] for call in served.trainer.calls if call[1] == model] == ["create", "backward", *["step"] * 4]


def test_models_of_one_seed_begin_alike_and_those_without_one_by_chance(served: Served, http: Http) -> None:
    models = [http.model(number, seed=seed) for number, seed in enumerate((3, 3, 4, None, None))]
    drawn = [
        next(tensor for name, tensor in served.trainer.models[model].parameters().items() if "lora_A" in name).clone()
        for model in models
    ]
    alike = {(i, j) for i in range(5) for j in range(i) if bool((drawn[i] == drawn[j]).all())}
    assert alike == {(1, 0)}


def test_a_repeated_request_is_answered_and_not_computed_again(served: Served, http: Http) -> None:
    model = http.model()
    content = body(model, 1)
    sent = [http.send(content), http.send(zstandard.ZstdCompressor().compress(content), **{"Content-Encoding": "zstd"})]
    assert len({item.json()["request_id"] for item in sent}) == 1
    first = http.answer(sent[0])
    assert http.answer(http.send(content)) == first
    steps = [http.answer(http.step(model, 2, learning_rate=0.1)) for _ in range(3)]
    assert steps[0] == steps[1] == steps[2]
    made = http.post(
        "create_model", session_id=http.session, model_seq_id=0, base_model=BASE, lora_config={"rank": 2, "seed": 1}
    )
    assert http.answer(made)["model_id"] == model
    assert [call[0] for call in served.trainer.calls if call[1] == model] == ["create", "backward", "step"]


def test_a_number_with_other_content_is_refused_and_the_first_one_stays(served: Served, http: Http) -> None:
    model = http.model()
    first = http.answer(http.step(model, 1, learning_rate=0.1))
    refused = http.answer(http.step(model, 1, learning_rate=0.2))
    assert refused == {
        "error": "seq_id is 1, which came before with other content; it must not be used again",
        "category": "user",
    }
    assert http.answer(http.step(model, 1, learning_rate=0.1)) == first
    other = http.post("create_model", session_id=http.session, model_seq_id=0, base_model=BASE, lora_config={"rank": 3})
    assert "came before with other content" in http.answer(other)["error"]


BAD = [
    ({"advantages": np.full(4, np.nan, np.float32)}, "cross_entropy", "advantages that are not finite"),
    ({"target_tokens": np.arange(5)}, "cross_entropy", r"datum 0 has target_tokens \[5\] for 4 tokens"),
    ({}, "no_such_loss", "loss_fn is 'no_such_loss'; it must be one of"),
]


@pytest.mark.parametrize(("inputs", "loss", "sentence"), BAD)
def test_a_datum_that_is_none_fails_by_its_future_and_training_goes_on(
    served: Served, http: Http, inputs: Any, loss: str, sentence: str
) -> None:
    model = http.model()
    refused = http.answer(http.send(body(model, 1, loss=loss, **inputs)))
    assert re.search(sentence, refused["error"])
    assert refused["category"] == "user"
    assert "request 1, forward_backward since the last optim_step, failed (" in http.answer(http.step(model, 2))["error"]
    assert isinstance(http.answer(http.send(body(model, 3))), bytes)
    assert http.answer(http.step(model, 4))["metrics"]["grad_norm"] > 0
    with served.client() as client:
        training = client.create_lora_training_client(base_model=BASE, rank=2).result()
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([0, 1, 2, 3]), loss_fn_inputs={"target_tokens": np.arange(4), **inputs}
        )
        with pytest.raises(tinker.RequestFailedError, match=sentence) as error:
            training.forward_backward([datum], loss).result()  # type: ignore[arg-type]
        assert error.value.category == types.RequestErrorCategory.User
        with pytest.raises(tinker.RequestFailedError, match="so there is no step"):
            training.optim_step(types.AdamParams()).result()
        assert training.optim_step(types.AdamParams()).result().metrics == {"grad_norm": 0.0}


def test_a_step_behind_a_pass_that_failed_is_none_and_the_model_is_as_it_was(served: Served, http: Http) -> None:
    """A client sends pass and step at once, and a large batch as several passes: the step means the gradients of all."""
    models = [http.model(number, seed=3) for number in range(2)]
    for model in models:
        assert http.answer(http.step(model, 2 if http.answer(http.send(body(model, 1))) else 0, learning_rate=0.1))
    spoilt, whole = models
    bad = {"advantages": np.full(4, np.nan, np.float32)}
    sent = [http.send(body(spoilt, 3)), http.send(body(spoilt, 4, **bad)), http.send(body(spoilt, 5)), http.step(spoilt, 6)]
    answers = [http.answer(future) for future in sent]
    assert [isinstance(answer, bytes) for answer in answers] == [True, False, True, False]
    assert answers[3]["category"] == "user"
    assert answers[3]["error"].startswith("request 4, forward_backward since the last optim_step, failed (datum 0 has adv")
    assert answers[3]["error"].endswith("so there is no step, and gradients since the last one are dropped; send them again")
    after = [
        [http.answer(http.send(body(model, seq, 6))), http.answer(http.step(model, seq + 1, learning_rate=0.1))]
        for model, seq in ((spoilt, 7), (whole, 3))
    ]
    assert after[0] == after[1]
    found, wanted = (served.trainer.models[model].parameters() for model in models)
    assert all((found[name] == parameter).all() for name, parameter in wanted.items())
    assert isinstance(http.answer(http.send(body(spoilt, 9, **bad))), dict)
    path = http.answer(http.post("save_weights", model_id=spoilt, seq_id=10, path="state"))["path"]
    http.answer(http.post("load_weights", model_id=spoilt, seq_id=11, path=path, optimizer=True))
    assert http.answer(http.step(spoilt, 12))["metrics"] == {"grad_norm": 0.0}


def test_bodies_that_are_too_large_and_bombs_fail_by_their_futures(http: Http) -> None:
    model = http.model()
    large = body(model, 1, 100_000)
    assert len(large) > MOST_BODY
    bomb = body(model, 3) + b"\x1a" + _varint(1 << 26) + bytes(1 << 26)
    bomb_packed = zstandard.ZstdCompressor().compress(bomb)
    assert len(bomb_packed) < 20_000
    answers = [
        http.answer(http.send(large)),
        http.answer(http.send(b"\x0a" + _varint(len(model)) + model.encode() + b"\x10\x02" + b"\x1a\xff\xff")),
        http.answer(http.send(bomb_packed, **{"Content-Encoding": "zstd"})),
        http.answer(http.step(model, 4)),
    ]
    assert f"the body has {len(large)} bytes; it must have at most {MOST_BODY}" in answers[0]["error"]
    assert "no ForwardBackwardRequest" in answers[1]["error"]
    assert f"bytes or more unpacked; it must have at most {MOST_BODY}" in answers[2]["error"]
    assert "request 3, forward_backward since the last optim_step, failed (the body" in answers[3]["error"]
    assert http.answer(http.step(model, 5))["metrics"] == {"grad_norm": 0.0}


def _varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])


def test_a_body_of_ten_gigabytes_is_refused_before_it_is_read(served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {KEY}\r\nContent-Length: {10**10}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Type: application/x-protobuf\r\n\r\n".encode() + bytes(1 << 19))
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 413")
    assert f"the body has {10**10} bytes; it must have at most {MOST_BODY}".encode() in answer


@pytest.mark.parametrize(
    ("path", "change", "sentence"),
    [
        ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "adam_params"),
        ("optim_step", {"adam_params": {"rate": 1.0}}, "adam_params"),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "must be AdamParams"),
        ("save_weights", {"path": "../x"}, "the name of a checkpoint must be"),
        ("save_weights", {"path": "x", "ttl_seconds": 5}, "ttl_seconds is 5"),
        ("save_weights", {"path": "x", "nothing": 5}, "nothing: Extra inputs"),
        ("save_weights_for_sampler", {"path": "x", "kind": "inflight"}, "must be snapshot"),
        ("save_weights_external", {"path": "x", "age_encryption_recipients": ["age1"]}, "age"),
        ("load_weights", {"path": "tinker://nobody:train:0/weights/x", "optimizer": True}, "does not exist"),
        ("load_weights", {"path": "/etc/passwd", "optimizer": True}, "a checkpoint's path must be"),
    ],
)
def test_what_a_model_is_asked_for_and_cannot_do_is_said_by_the_future(
    http: Http, path: str, change: dict[str, Any], sentence: str
) -> None:
    model = http.model()
    answer = http.answer(http.post(path, model_id=model, seq_id=1, **change))
    assert sentence in answer["error"]
    assert answer["category"] == "user"
    assert http.answer(http.step(model, 2))["type"] == "optim_step"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"base_model": "other"}, f"base_model is other; it must be one of {BASE}"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank is 0; it must be from 1 to 128"),
        ({"lora_config": {"rank": 1000}}, "lora_config.rank is 1000"),
        ({"lora_config": None}, "lora_config is missing"),
        ({"lora_config": {"rank": 2, "train_attn": False, "train_mlp": False, "train_unembed": False}}, "trains nothing"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type is dimuon; it must be adamw"),
    ],
)
def test_a_model_that_cannot_be_is_not_made(http: Http, change: dict[str, Any], sentence: str) -> None:
    asked = {"session_id": http.session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 2}, **change}
    assert sentence in http.answer(http.post("create_model", **asked))["error"]
    assert http.model()


def test_requests_of_a_model_that_is_not_there_and_without_a_number_are_refused(http: Http) -> None:
    assert http.answer(http.step("x:train:0", 1))["error"] == "model x:train:0 does not exist"
    assert "seq_id must be a number" in http.answer(http.post("optim_step", model_id=http.model(), adam_params={}))["error"]
    assert http.post("get_info", model_id="x:train:0").status_code == 404
    assert http.post("unload_model", model_id="x:train:0").status_code == 404


def test_a_request_before_which_one_never_comes_is_refused_in_the_end(served: Served, http: Http) -> None:
    model = http.model()
    future = http.step(model, 3)
    served.call(served.service.models.requests.skip_overdue, 0.0)
    assert http.answer(future)["error"] == "request 3 waited 0 s for request 1 of its model, which did not come"
    assert "request 1 of its model, which did not come, so there is no step" in http.answer(http.step(model, 4))["error"]
    assert http.answer(http.step(model, 5))["metrics"] == {"grad_norm": 0.0}


def test_an_unloaded_model_is_gone_and_what_waited_is_told(http: Http) -> None:
    model = http.model()
    waiting = http.step(model, 2)
    assert http.answer(http.post("unload_model", model_id=model)) == {"model_id": model, "type": "unload_model"}
    assert http.answer(waiting)["error"] == http.answer(http.step(model, 1))["error"] == f"model {model} was unloaded"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sampling_session_id": "x:sample:0", "seq_id": 0}, "sampler x:sample:0 does not exist, or has expired"),
        ({"base_model": "other"}, "base_model is 'other'"),
        ({"model_path": "tinker://x:train:0/sampler_weights/y"}, "does not exist, or has expired"),
        ({"base_model": BASE, "record_stability_info": True}, "no stable_reinforce"),
        ({"base_model": BASE, "prompt": {"chunks": [{"tokens": [-1], "type": "encoded_text"}]}}, "token id that is below 0"),
        ({"base_model": BASE, "prompt": {"chunks": [{"dmel": "", "type": "dmel"}]}}, "chunk of kind dmel"),
    ],
)
def test_samples_that_cannot_be_are_refused_by_their_futures(http: Http, change: dict[str, Any], sentence: str) -> None:
    asked = {"prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]}, "sampling_params": {}, **change}
    assert sentence in http.answer(http.post("asample", **asked))["error"]


def test_a_repeated_sample_is_answered_and_another_one_of_its_number_refused(served: Served, http: Http) -> None:
    made = http.post("create_sampling_session", session_id=http.session, sampling_session_seq_id=0, base_model=BASE)
    sampler, prompt = made.json()["sampling_session_id"], {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 3}}
    before = len(served.sampler.asked)
    first = http.post("asample", **asked)
    assert http.answer(http.post("asample", **asked)) == http.answer(first)
    assert first.json()["sample_sequence_ids"] == [f"{sampler}:0:0"]
    assert len(served.sampler.asked) == before + 1
    other = http.post("asample", **{**asked, "num_samples": 2})
    assert http.answer(other)["error"] == "seq_id is 0, which came before with other content"


def test_a_sample_that_nobody_waits_for_is_ended(served: Served, http: Http) -> None:
    served.call(served.sampler.gate.clear)
    cancelled = served.sampler.cancelled
    asked = {"prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}, "sampling_params": {}, "base_model": BASE}
    future = http.post("asample", **asked)
    while not served.sampler.asked or served.sampler.cancelled == cancelled:
        assert http.post("cancel_future", request_id=future.json()["request_id"]).status_code == 200
        time.sleep(0.05)
    assert "cancelled" in http.answer(future)["error"]
    served.call(served.sampler.gate.set)


def test_what_is_not_there_is_named(served: Served, http: Http) -> None:
    answer = http.post("forward_sideways")
    assert answer.status_code == 404
    assert answer.json()["error"] == "POST /api/v1/forward_sideways is no part of this server, megarl serve"
    assert http.post("retrieve_future", request_id="x").status_code == 410
    assert http.post("create_model", nothing=1).status_code == 422
    assert http.send(b"{}", **{"Content-Type": "application/json"}).status_code == 415
    assert httpx.get(f"{served.url}/api/v1/healthz").json() == {"status": "ok"}
    assert httpx.post(f"{served.url}/api/v1/client/config", json={}).status_code == 401


def test_a_trainer_that_fails_is_the_servers_error_and_says_nothing_of_its_inside(served: Served, http: Http) -> None:
    model = http.model()
    run_pass = served.trainer.run_pass

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("/a/secret/path")

    served.trainer.run_pass = fail  # type: ignore[method-assign]
    answer = http.answer(http.send(body(model, 1)))
    served.trainer.run_pass = run_pass  # type: ignore[method-assign]
    assert answer == {"error": "the server could not do forward_backward: ValueError", "category": "server"}
    assert any("/a/secret/path" in line for line in served.said)
    assert isinstance(http.answer(http.send(body(model, 2))), bytes)


def test_a_half_written_checkpoint_is_no_model(served: Served, http: Http) -> None:
    model = http.model()
    path = http.answer(http.post("save_weights", model_id=model, seq_id=1, path="whole"))["path"]
    (file,) = [*Path(served.service.store.root).rglob("whole/content/data/state/weights.safetensors")]
    file.write_bytes(file.read_bytes()[:-10])
    answer = http.answer(http.post("load_weights", model_id=model, seq_id=2, path=path, optimizer=True))
    assert "is damaged" in answer["error"]
    made = http.post("load_weights", session_id=http.session, model_seq_id=5, path=path, optimizer=True)
    assert "is damaged" in http.answer(made)["error"]
    assert http.answer(http.step(model, 3))["type"] == "optim_step"


def test_an_expired_sampler_says_so(served: Served, http: Http) -> None:
    model = http.model()
    first, second = (
        http.answer(http.post("save_weights_for_sampler", model_id=model, seq_id=seq, sampling_session_seq_id=seq))
        for seq in (1, 2)
    )
    served.service.samplers.sessions[first["sampling_session_id"]].used -= 10_000
    served.service.samplers.sessions[second["sampling_session_id"]].used -= 10_000
    served.call(served.service.samplers.expire)
    prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    answers = [
        http.answer(
            http.post("asample", sampling_session_id=of["sampling_session_id"], seq_id=0, prompt=prompt, sampling_params={})
        )
        for of in (first, second)
    ]
    assert "has expired: it was not used for 3600 s" in answers[0]["error"]
    assert isinstance(answers[1], bytes)
    assert len([*(served.service.options.scratch).glob("passed-*")]) >= 2


def test_a_session_that_is_not_heard_of_is_over_and_what_its_models_learnt_is_kept(tmp_path: Path) -> None:
    with serving(tmp_path, max_body_bytes=MOST_BODY, session_idle_s=400.0, model_idle_s=600.0) as served:
        gone, there = Http(served), Http(served)
        model, other = gone.model(), there.model()
        unused = gone.model(1)
        http_answers = [gone.answer(gone.send(body(model, 1))), gone.answer(gone.step(model, 2, learning_rate=0.1))]
        assert len(http_answers) == 2
        passed = gone.answer(gone.post("save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0))
        waiting = gone.step(model, 9)
        learnt = {name: tensor.clone() for name, tensor in served.trainer.models[model].parameters().items()}
        service, before = served.service, time.monotonic()
        served.call(service.watch)
        assert gone.session in service._seen
        for of_gone in (service.models.models[model], service.models.models[unused], *service.samplers.sessions.values()):
            of_gone.used = before - 1001.0
        service._seen[gone.session] = before - 401.0
        service._seen[there.session] = before - 399.0
        served.call(service.watch)
        assert gone.answer(gone.step(unused, 1))["type"] == "optim_step", "it is idle, and not over"
        service.models.models[unused].used = before - 1001.0
        service._idle[gone.session] = before - 601.0
        served.call(service.watch)
        state = f"tinker://{model}/weights/idle-000003"
        of_unused = f"tinker://{unused}/weights/idle-000001"
        over = f"session {gone.session} is over, as its client was not heard of for 1001 s"
        prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
        sampler = {"sampling_session_id": passed["sampling_session_id"], "seq_id": 0, "sampling_params": {}, "prompt": prompt}
        for answer in (
            gone.post("session_heartbeat", session_id=gone.session),
            gone.send(body(model, 4)),
            gone.step(unused, 2),
            gone.post("get_info", model_id=model),
            gone.post("asample", **sampler),
            gone.post("create_model", session_id=gone.session, model_seq_id=2, base_model=BASE, lora_config={"rank": 2}),
            gone.post("create_sampling_session", session_id=gone.session, sampling_session_seq_id=1, base_model=BASE),
        ):
            assert answer.status_code == 410, answer.text
            assert answer.json()["error"].startswith(over)
            assert f"kept as {state}, {of_unused}, where the quota" in answer.json()["error"]
        assert "is gone, as its session is over" in gone.answer(waiting)["error"]
        while {model, unused} & {*served.trainer.models} or served.sampler.adapters:
            time.sleep(0.05)
        assert served.service.tenants.usage.running(served.service.tenants.tenant("local")) == 0
        assert there.answer(there.step(other, 1))["type"] == "optim_step"
        assert state in [info.path.text for info in service.store.listed("local")]
        loaded = there.post("load_weights", session_id=there.session, model_seq_id=1, path=state, optimizer=True)
        again = there.answer(loaded)["model_id"]
        found = served.trainer.models[again]
        assert found.step == 1
        assert all((learnt[name] == tensor).all() for name, tensor in found.parameters().items())
    with serving(tmp_path) as served, served.client() as client:
        assert gone.session not in served.service._seen
        assert client.create_rest_client().get_session(gone.session).result().training_run_ids


def test_quotas_are_given_back_by_unloading_a_model_and_by_a_session_that_is_over(tmp_path: Path) -> None:
    key, entry = new_key("anna")
    (tmp_path / "tenants.yaml").write_text(f"{entry}  models: 1\n  running_requests: 2\n")
    with serving(tmp_path / "server", tenants=tmp_path / "tenants.yaml", session_idle_s=400.0, model_idle_s=600.0) as served:
        http, other = Http(served, key), Http(served, key)
        first = http.model()
        refused = {"session_id": http.session, "model_seq_id": 1, "base_model": BASE, "lora_config": {"rank": 2}}
        assert "tenant anna has 1 models, and its quota is 1" in http.answer(http.post("create_model", **refused))["error"]
        http.answer(http.post("unload_model", model_id=first))
        second = http.model(2)
        waiting = [http.step(second, seq) for seq in (8, 9)]
        assert http.step(second, 7).status_code == 429, "as many requests as it may have"
        service, long_ago = served.service, time.monotonic() - 1001.0
        service.models.models[first].used = service.models.models[second].used = service._seen[http.session] = long_ago
        served.call(service.watch)
        service._idle[http.session] = long_ago
        served.call(service.watch)
        assert all("its session is over" in http.answer(future)["error"] for future in waiting)
        third = other.model()
        assert [other.answer(other.step(third, seq))["type"] for seq in (1, 2, 3)] == ["optim_step"] * 3


def test_adapters_of_checkpoints_that_are_gone_leave_the_engines_once_nobody_uses_them(served: Served, http: Http) -> None:
    model = http.model()
    path = http.answer(http.post("save_weights_for_sampler", model_id=model, seq_id=1, path="short"))["path"]
    made = http.post("create_sampling_session", session_id=http.session, sampling_session_seq_id=0, model_path=path)
    prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    asked = {"sampling_session_id": made.json()["sampling_session_id"], "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    assert isinstance(http.answer(http.post("asample", **asked, seq_id=0)), bytes)
    served.call(served.service.watch)
    (name,) = [name for name in served.sampler.adapters if "short" in name]
    served.call(served.sampler.gate.clear)
    running = http.post("asample", **asked, seq_id=1)
    time.sleep(0.2)
    served.service.store.delete("local", CheckpointPath.parse(path))
    served.call(served.service.watch)
    time.sleep(0.2)
    assert name in served.sampler.adapters
    served.call(served.sampler.gate.set)
    assert isinstance(http.answer(running), bytes)
    while name in served.sampler.adapters:
        time.sleep(0.05)
    assert "does not exist, or has expired" in http.answer(http.post("asample", **asked, seq_id=2))["error"]


def test_errors_have_one_form(http: Http) -> None:
    answer = http.post("session_heartbeat", session_id="nobody")
    assert {*json.loads(answer.content)} == {"error", "category", "detail"}
