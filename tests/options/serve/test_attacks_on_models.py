"""Attacks of one tenant on another's models, samplers and answers, on a whole server: what is tried, and what is answered.

Each row is tried by ben on what anna has; the same is tried on ids that never were, and the two answers must be one. Afterwards
anna's client goes on as if nothing had been.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import pytest
import tinker
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from megarl.options.serve.tenants import add_tenant
from tests.options.serve.management_server import quick_hashes
from tests.options.serve.served import BASE, Served, serving

NEVER = "99999999-9999-4999-8999-999999999999"
LORA = {"rank": 4, "seed": 0}
PARAMS = {"learning_rate": 1.0}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 5, 9]}]}
TOKENS = {"num_samples": 1, "prompt": PROMPT, "sampling_params": {"max_tokens": 4, "seed": 0}}


@dataclass
class Prey:
    """A server with anna's clients and what they have; `ids` are what rows are written in."""

    served: Served
    keys: dict[str, str]
    plain: httpx.Client
    training: tinker.TrainingClient
    sampling: tinker.SamplingClient
    ids: dict[str, str]
    count: Iterator[int]

    def post(self, route: str, body: dict[str, Any] | bytes) -> httpx.Response:
        """A request by ben."""
        headers = {"X-API-Key": self.keys["ben"], "Content-Type": "application/json"}
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/x-protobuf"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.plain.post(f"{self.served.url}/api/v1/{route}", content=content, headers=headers)

    def outcome(self, route: str, body: dict[str, Any] | bytes) -> tuple[int, str]:
        """Status and sentence of what ben gets in the end, by a future if there is one."""
        answer = self.post(route, body)
        content = answer.json() if answer.headers.get("content-type", "").startswith("application/json") else {}
        end = time.monotonic() + 20
        while answer.status_code == 200 and "request_id" in content and time.monotonic() < end:
            found = self.post("retrieve_future", {"request_id": content["request_id"]})
            if b"try_again" not in found.content:
                return found.status_code, found.text
            time.sleep(0.05)
        return answer.status_code, answer.text


def datum() -> types.Datum:
    targets = types.TensorData(data=[5, 9, 3], dtype="int64", shape=[3])
    weights = types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3])
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 5, 9]), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )


def loss(training: tinker.TrainingClient) -> float:
    return training.forward([datum()], "cross_entropy").result().metrics["loss:sum"]


@pytest.fixture(scope="module")
def prey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prey]:
    folder = tmp_path_factory.mktemp("prey")
    with pytest.MonkeyPatch.context() as patch, quick_hashes(), httpx.Client(trust_env=False, timeout=60) as plain:
        patch.setenv("TINKER_TELEMETRY", "0")
        keys = {
            name: add_tenant(folder / "tenants.yaml", name).partition("TINKER_API_KEY=")[2].split()[0]
            for name in ("anna", "ben")
        }
        with serving(folder / "run", tenants=folder / "tenants.yaml") as served:
            mine, own = served.client(keys["anna"]), served.client(keys["ben"])
            training = mine.create_lora_training_client(BASE, rank=4, seed=0).result()
            training.forward_backward([datum()], "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=0.01)).result()
            weights = training.save_state("final").result().path
            sampler = training.save_weights_for_sampler("final").result().path
            sampling = mine.create_sampling_client(model_path=sampler).result()
            bens = own.create_lora_training_client(BASE, rank=4, seed=0).result()
            ids = {
                "SESSION": weights.removeprefix("tinker://").partition(":")[0],
                "BENS_SESSION": bens.model_id.partition(":")[0],
                "BENS_PATH": bens.save_state("final").result().path,
                "SAMPLER": next(iter(served.service.samplers.sessions)),
            }
            assert weights == f"tinker://{ids['SESSION']}:train:0/weights/final"
            assert sampler == f"tinker://{ids['SESSION']}:train:0/sampler_weights/final"
            yield Prey(served, keys, plain, training, sampling, ids, count(2))


def passing(model: str, seq: int) -> bytes:
    asked = types.ForwardBackwardInput(data=[datum()], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=asked, model_id=model, seq_id=seq)
    return forward_backward_request_to_proto(request).SerializeToString()


MODEL, WEIGHTS, SAMPLED = (
    "SESSION:train:0",
    "tinker://SESSION:train:0/weights/final",
    "tinker://SESSION:train:0/sampler_weights/final",
)
HERS, OWN = {"session_id": "SESSION"}, {"session_id": "BENS_SESSION"}
LOADED: dict[str, Any] = {"path": WEIGHTS, "optimizer": True}
NINTH = {"sampling_session_seq_id": 9}
TOKEN = {"weights_access_token": "BENS_KEY"}
NEXT = {"model_id": MODEL, "seq_id": 5}
GRAPH = {"format": 1, "nodes": []}
Attempt = tuple[str, dict[str, Any] | Callable[[str], bytes]]
"""A route, and a body in the names of `Prey.ids`, or what makes a binary one of anna's model."""
NEW = {"base_model": BASE, "lora_config": LORA}
ATTACKS: dict[str, Attempt] = {
    "make a model in a session": ("create_model", {**HERS, "model_seq_id": 7, **NEW}),
    "make a model that is there": ("create_model", {**HERS, "model_seq_id": 0, **NEW}),
    "make a model of a checkpoint, in its session": ("load_weights", {**HERS, "model_seq_id": 8, **LOADED}),
    "make a model of a checkpoint": ("load_weights", {**OWN, "model_seq_id": 8, **LOADED}),
    "make a model of it with an own token": (
        "load_weights",
        {**OWN, "model_seq_id": 9, **LOADED, **TOKEN},
    ),
    "load it into an own model": ("load_weights", {"model_id": "BENS_SESSION:train:0", "seq_id": "COUNT", **LOADED}),
    "load an own one into a model": ("load_weights", {**NEXT, "path": "BENS_PATH", "optimizer": False}),
    "train a model": ("forward_backward", lambda model: passing(model, 5)),
    "train a model by a request that was answered": ("forward_backward", lambda model: passing(model, 1)),
    "train a model with a number far ahead": ("forward_backward", lambda model: passing(model, 2**31 - 1)),
    "step a model": ("optim_step", {**NEXT, "adam_params": PARAMS, "type": "optim_step"}),
    "step a model by a request that was answered": ("optim_step", {"model_id": MODEL, "seq_id": 2, "adam_params": PARAMS}),
    "save a model": ("save_weights", {**NEXT, "path": "stolen"}),
    "save over a checkpoint": ("save_weights", {**NEXT, "path": "final", "overwrite": True}),
    "save a model to sample from": ("save_weights_for_sampler", {**NEXT, "path": "stolen"}),
    "pass a model to a sampler": ("save_weights_for_sampler", {**NEXT, "sampling_session_seq_id": 9}),
    "save a model to download": ("save_weights_external", {**NEXT, "path": "stolen"}),
    "unload a model": ("unload_model", {"model_id": MODEL}),
    "ask what a model is": ("get_info", {"model_id": MODEL}),
    "sample from a checkpoint in its session": ("create_sampling_session", {**HERS, **NINTH, "model_path": SAMPLED}),
    "sample from a checkpoint": ("create_sampling_session", {**OWN, **NINTH, "model_path": SAMPLED}),
    "sample the base in a session": ("create_sampling_session", {**HERS, **NINTH, "base_model": BASE}),
    "join a sampler": ("join_sampling_session", {"sampling_session_id": "SAMPLER"}),
    "sample by a sampler": ("asample", {**TOKENS, "sampling_session_id": "SAMPLER", "seq_id": 77}),
    "sample by a request that was answered": ("asample", {**TOKENS, "sampling_session_id": "SAMPLER", "seq_id": 0}),
    "sample from a path": ("asample", {**TOKENS, "model_path": SAMPLED}),
    "fetch an answer of training": ("retrieve_future", {"request_id": f"{MODEL}:1"}),
    "fetch an answer of sampling": ("retrieve_future", {"request_id": "SAMPLER:0"}),
    "list the answers of a sampler": ("retrieve_futures", {"target": {"sampling_session_id": "SAMPLER"}, "timeout": 0.1}),
    "delete the answers of a sampler": (
        "retrieve_futures",
        {"target": {"sampling_session_id": "SAMPLER"}, "timeout": 0.1, "retrieved_request_ids": ["SAMPLER:0"]},
    ),
    "cancel a sample": ("cancel_future", {"request_id": "SAMPLER:0"}),
    "cancel training": ("cancel_future", {"request_id": f"{MODEL}:1"}),
    "keep a session alive": ("session_heartbeat", {"session_id": "SESSION"}),
    "finish a session": ("sessions/SESSION/finish", {"reason": {"type": "success"}}),
    "define a loss in a session": (
        "create_custom_loss",
        {**HERS, "custom_loss_seq_id": 9, "name": "l", "inputs": [], "graph": GRAPH},
    ),
    "copy a checkpoint": ("copy_weights", {"source_path": WEIGHTS, **OWN, "model_seq_id": "COUNT"}),
    "copy a checkpoint into its session": ("copy_weights", {"source_path": "BENS_PATH", **HERS, "model_seq_id": 21}),
    "copy a checkpoint with an own token": (
        "copy_weights",
        {"source_path": WEIGHTS, **OWN, "model_seq_id": "COUNT", **TOKEN},
    ),
}  # fmt: skip


def filled(prey: Prey, body: dict[str, Any], session: str) -> dict[str, Any]:
    """The body with ids in the place of names."""
    sampler = prey.ids["SAMPLER"].replace(prey.ids["SESSION"], session)
    places = {"BENS_SESSION": prey.ids["BENS_SESSION"], "BENS_PATH": prey.ids["BENS_PATH"], "BENS_KEY": prey.keys["ben"]}
    text = json.dumps(body)
    if '"COUNT"' in text:  # the next number of ben's model
        text = text.replace('"COUNT"', str(next(prey.count)))
    for name, value in {**places, "SAMPLER": sampler, "SESSION": session}.items():
        text = text.replace(name, value)
    return json.loads(text)


def tried(prey: Prey, attempt: Attempt, session: str) -> tuple[int, str]:
    route, body = attempt
    made = body(f"{session}:train:0") if callable(body) else filled(prey, body, session)
    status, text = prey.outcome(route.replace("SESSION", session), made)
    return status, text.replace(session, "SESSION")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda name: name.replace(" ", "_"))
def test_nothing_of_another_tenant_s_is_reached(prey: Prey, attack: str) -> None:
    before, steps = loss(prey.training), len(prey.served.service.store.listed("anna"))
    status, text = tried(prey, ATTACKS[attack], prey.ids["SESSION"])
    assert (status, text) == tried(prey, ATTACKS[attack], NEVER)
    assert status in (200, 404, 410)
    assert attack.startswith("cancel") or "does not exist" in text or status == 410
    assert loss(prey.training) == before
    assert len(prey.served.service.store.listed("anna")) == steps


def test_her_client_goes_on_as_if_nothing_had_been(prey: Prey) -> None:
    found = prey.sampling.sample(types.ModelInput.from_ints([1, 5, 9]), 1, types.SamplingParams(max_tokens=4, seed=0)).result()
    assert len(found.sequences[0].tokens) >= 1
    with serving(prey.served.service.options.scratch.parent.parent / "alone") as alone:
        other = alone.client().create_lora_training_client(BASE, rank=4, seed=0).result()
        for training in (other, prey.training):
            if training is other:
                training.forward_backward([datum()], "cross_entropy").result()
                training.optim_step(types.AdamParams(learning_rate=0.01)).result()
            training.forward_backward([datum()], "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        assert loss(other) == loss(prey.training)
