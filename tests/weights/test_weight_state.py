"""No order of calls lets an engine answer with weights of no known version, or with a mixture of two.

All short sequences of calls, against a table that says where each call leads from each state.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from megarl.errors import EngineError
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions, SglangServer
from megarl.weights.checksums import UNCHECKED, EngineLayout, digest
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.rank_plan import SliceKey
from megarl.weights.weight_state import Weights, WeightState
from tests.rollout.tiny import load, save_tiny, weights_of

E, U, C, S, A = Weights.EMPTY, Weights.UPDATING, Weights.CHECKING, Weights.SERVING, Weights.ASLEEP
TABLE = {
    "begin": {E: U, S: U},
    "begin on the version held": {S: U},
    "begin on another version": {},
    "receive": {U: U},
    "check": {U: C},
    "check another version": {},
    "confirm": {C: S},
    "doubt": {C: U},
    "fail": {U: E, C: E},
    "sleep": {E: A, S: A},
    "wake": {A: E},
    "lose": {E: E, U: E, C: E, S: E, A: E},
}
"""Where each call leads; what is not here is refused and changes nothing."""


def act(state: WeightState, call: str) -> None:
    """Make a call; versions count up."""
    version = (state.version or 0) + 1
    actions: dict[str, Any] = {
        "begin": lambda: state.begin(version),
        "begin on the version held": lambda: state.begin(version, state.version if state.version is not None else 77),
        "begin on another version": lambda: state.begin(version, 99),
        "receive": state.receive,
        "check": lambda: state.check(state.updating or 0),
        "check another version": lambda: state.check(-1),
        "confirm": state.confirm,
        "doubt": state.doubt,
        "fail": state.fail,
        "sleep": state.sleep,
        "wake": state.wake,
        "lose": state.lose,
    }
    actions[call]()


@pytest.mark.parametrize("first", [None, 3])
def test_every_sequence_of_four_calls_follows_the_table(first: int | None) -> None:
    for calls in itertools.product(TABLE, repeat=4):
        state, expected = WeightState(first), E if first is None else S
        for call in calls:
            leads_to = TABLE[call].get(expected)
            before = vars(state).copy()
            try:
                act(state, call)
            except EngineError:
                assert leads_to is None, calls
                assert vars(state) == before, calls
            else:
                assert leads_to is not None, calls
                expected = leads_to
            assert state.now is expected, calls
            assert (state.version is not None) == (expected is S), calls
            assert (state.updating is not None) == (expected in (U, C)), calls


class Model:
    """What must be true of an engine, whoever it is: the reference of the next test."""

    def __init__(self) -> None:
        self.state, self.version, self.complete = E, None, False
        self.open: int | None = None

    def call(self, call: str, version: int) -> bool:
        """Whether the call is accepted."""
        if call == "begin":
            accepted = self.state in (E, S)
            if accepted:
                self.state, self.version, self.open, self.complete = U, None, version, False
        elif call == "begin on 1":
            accepted = self.state is S and self.version == 1
            if accepted:  # the weights it has are a part of what must be there in the end
                self.state, self.version, self.open, self.complete = U, None, version, True
        elif call == "send":
            accepted = self.state is U
            self.complete = self.complete or accepted
        elif call == "end":
            accepted = self.state is U and self.complete
            if self.state is U:
                self.state, self.version = (S, self.open) if self.complete else (E, None)
        elif call == "abandon":
            accepted = self.state is U
            self.state = E if accepted else self.state
        elif call == "sleep":
            accepted = self.state in (E, S)
            self.state, self.version = (A, None) if accepted else (self.state, self.version)
        else:
            accepted = self.state is A
            self.state = E if accepted else self.state
        return accepted


CALLS = ("begin", "begin on 1", "send", "end", "abandon", "sleep", "wake")


async def follows_the_model(engine: Any, weights: Any, checksums: dict[str, str], calls: tuple[str, ...]) -> None:
    """Make `calls`, each to be accepted or refused as the model says, and see that only complete weights answer."""
    model, version = Model(), 0
    for call in calls:
        is_delta = model.state is U and engine._weights.base is not None
        version += call.startswith("begin")
        accepted = model.call(call, version)
        actions: dict[str, Any] = {
            "begin": partial(engine.begin_update, version),
            "begin on 1": partial(engine.begin_update, version, 1),
            "send": partial(engine.apply_update, weights),
            "end": partial(engine.end_update, version, checksums if is_delta else None),
            "abandon": engine.abandon_update,
            "sleep": engine.sleep,
            "wake": engine.wake,
        }
        if not accepted:
            with pytest.raises(EngineError):
                await actions[call]()
            version -= call.startswith("begin")
        else:
            await actions[call]()
        assert engine.weight_version == model.version, calls
        if model.version is None:
            with pytest.raises(EngineError, match="no weights of a known version"):
                await engine.generate(EngineRequest([[3]], SamplingParams(max_new_tokens=1)))
    if model.version is not None:
        (((one,),),) = (await engine.generate(EngineRequest([[3]], SamplingParams(max_new_tokens=1))),)
        assert one.weight_versions == [model.version]


SMALLEST = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model so small that thousands of updates take seconds."""
    return save_tiny(tmp_path_factory.mktemp("smallest"), LlamaConfig(**SMALLEST))


def sequences() -> list[tuple[str, ...]]:
    """All sequences of up to four calls, and those that go on after a first complete update."""
    short = [calls for length in range(1, 5) for calls in itertools.product(CALLS, repeat=length)]
    return short + [("begin", "send", "end", *calls) for calls in itertools.product(CALLS, repeat=3)]


def test_the_embedded_engine_answers_with_complete_weights_alone(smallest: Path) -> None:
    engine = EmbeddedEngine(smallest)
    weights = weights_of(load(smallest))
    checksums = {name: digest(weight) for name, weight in weights}

    async def scenario() -> None:
        for calls in sequences():
            engine._weights.lose()
            await follows_the_model(engine, weights, checksums, calls)

    asyncio.run(scenario())


class Wire:
    """SGLang's side as far as this client can see it: it answers control requests, and refuses what a server refuses."""

    def __init__(self) -> None:
        self.paused = self.session = False
        self.held = {"weights", "kv_cache", "cuda_graph"}
        self.version = ""

    async def post(self, session: Any, endpoint: str, body: dict[str, Any]) -> Any:
        """Answer one request."""
        if endpoint == "pause_generation":
            self.paused = True
        elif endpoint == "continue_generation":
            self.paused = False
        elif endpoint in ("begin_weight_update", "end_weight_update"):
            if self.session == (endpoint == "begin_weight_update"):
                raise EngineError(f"{endpoint} answered 400")
            assert "weights" in self.held
            self.session = not self.session
        elif endpoint == "update_weight_version":
            self.version = body["new_version"]
        elif endpoint == "release_memory_occupation":
            assert {*body["tags"]} <= self.held, "a server fails at the second in a row"
            self.held -= {*body["tags"]}
        elif endpoint == "resume_memory_occupation":
            assert not {*body["tags"]} & self.held, "a server fails at the second in a row"
            self.held |= {*body["tags"]}
        elif endpoint == "generate":
            assert (self.paused, self.session, len(self.held)) == (False, False, 3), "sampling may not go on"
            info = {"output_token_logprobs": [(0.0, 1)], "finish_reason": {"type": "length"}}
            span = {"start": 0, "end": 1, "version": self.version}
            return {"output_ids": [1], "meta_info": info | {"weight_versions": [span]}}
        return {}


def everything(layout: EngineLayout) -> dict[SliceKey, str]:
    """All that an engine holds, sent without checksums."""
    return dict.fromkeys((held for of_tensor in layout.slices.values() for held in of_tensor), UNCHECKED)


class WireSender:
    """Sends to nobody and says that everything was sent."""

    def __init__(self, endpoint: Any) -> None:
        self.layout = endpoint.layout
        self.sent: dict[SliceKey, str] = {}

    def send(self, bucket: Any) -> None:
        """Take note of it."""
        self.sent = everything(self.layout)

    def checksums(self) -> dict[SliceKey, str]:
        """What was sent."""
        return self.sent


def test_the_sglang_engine_answers_with_complete_weights_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same sequences; the server's side is a table here, since thousands of real updates would take minutes."""
    monkeypatch.setattr("megarl.rollout.engines.sglang.engine.TensorSender", WireSender)
    layout = EngineLayout(ServedModel(LlamaConfig(architectures=["LlamaForCausalLM"], **SMALLEST).to_dict(), "float32"))

    async def scenario() -> None:
        for calls in sequences():
            engine = SglangEngine(SglangServer(ServerOptions("model", tmp_path / "log")), layout)
            engine._client._post = Wire().post  # type: ignore[method-assign]
            await follows_the_model(engine, [("w", torch.zeros(1))], everything(layout), calls)

    asyncio.run(scenario())
