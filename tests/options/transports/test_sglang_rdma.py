"""SGLang servers whose ranks read weights from a training rank's registered buffers, by the real NIXL."""

from __future__ import annotations

import asyncio
import pickle
import re
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import EngineError
from megarl.options.transports.rdma import Readable, RegisteredMemory
from megarl.options.transports.sender import ReadSender
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.weights.pusher import Pusher
from megarl.weights.staging import StagedSlices
from megarl.workers.senders import Membership, open_sender
from tests.rollout.tiny import PROMPTS, largest_difference, load, weights_of

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="needs NIXL: pip install 'megarl[rdma]'")

SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.7)


async def update(engine: SglangEngine, pusher: Pusher, model: Any, version: int, base: int | None = None) -> int:
    """A whole update, or one of what changed; the number of pieces that were sent."""
    sent: list[int] = []
    deliver = pusher.senders[0].deliver

    def counted(staged: StagedSlices) -> None:
        sent.append(len(staged.pieces))
        deliver(staged)

    pusher.senders[0].deliver = counted  # type: ignore[method-assign]
    try:
        await engine.begin_update(version, base)
        pushed = await asyncio.to_thread(pusher.push, iter(weights_of(model)), {0: base}, version)
        assert pushed[0].error is None, pushed[0].error
        await engine.end_update(version, pushed[0].checksums)
    finally:
        pusher.senders[0].deliver = deliver  # type: ignore[method-assign]
    return sum(sent)


async def agrees(engine: SglangEngine, model: Any, version: int) -> None:
    """The engine samples under these weights, whose checksums were compared; the bound is for float32 sums in another order."""
    groups = await engine.generate(EngineRequest(PROMPTS, SAMPLING, n=2))
    assert largest_difference(model, PROMPTS, groups, 0.7) < 1e-4
    assert {v for group in groups for one in group for v in one.weight_versions} == {version}


def connected(engine: SglangEngine, load_bytes: int = 2**16) -> Pusher:
    """A training rank that sends to this engine alone."""
    pusher = Pusher("rank", load_bytes=load_bytes)
    pusher.connect(0, partial(open_sender, engine.endpoint, "rdma", Membership(), 60.0))
    assert pusher.unreachable == {}
    return pusher


@pytest.mark.slow
@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_the_ranks_read_the_senders_values_update_after_update(
    sglang_engine: SglangEngine, tiny_path: Path, tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)  # of this process; both sides then use what both have

    async def scenario() -> None:
        pusher = connected(sglang_engine)
        model = load(tiny_path, seed=14)
        pieces = await update(sglang_engine, pusher, model, 41)
        await agrees(sglang_engine, model, 41)
        for version in (42, 43):
            model = load(tiny_path, seed=version)
            assert await update(sglang_engine, pusher, model, version) == pieces
            await agrees(sglang_engine, model, version)
        model.model.layers[1].mlp.down_proj.weight.data += 0.1
        assert await update(sglang_engine, pusher, model, 44, base=43) == 1
        await agrees(sglang_engine, model, 44)

    asyncio.run(scenario())


ENDS_AT_ONCE = """
import os, pickle, torch
from megarl.options.transports.rdma import RegisteredMemory
memory, buffer = RegisteredMemory("lost"), torch.zeros(2**20, dtype=torch.uint8)
memory.register(buffer)
print(pickle.dumps(tuple(memory.readable(buffer))).hex(), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_that_is_lost_fails_the_update_in_a_sentence_and_the_engine_takes_another(
    sglang_engine: SglangEngine, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's request comes from a live process, since a dead one could not see the answer; the memory does not."""
    ended = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], stdout=subprocess.PIPE, check=True, text=True, timeout=120)
    lost = Readable(*pickle.loads(bytes.fromhex(ended.stdout.splitlines()[-1])))

    async def scenario() -> None:
        pusher, model = connected(sglang_engine), load(tiny_path, seed=16)
        with monkeypatch.context() as patched:
            patched.setattr(RegisteredMemory, "readable", lambda *_: lost)
            await sglang_engine.begin_update(50)
            began = time.monotonic()
            pushed = await asyncio.to_thread(pusher.push, iter(weights_of(model)), {0: None}, 50)
            assert time.monotonic() - began < 30
        assert pushed[0].error is not None
        url = re.escape(sglang_engine.endpoint.url)
        sentence = f"{url} could not take the weights: reading weights from lost-.+ failed .+: its process has ended or .*"
        assert re.fullmatch(sentence, pushed[0].error)
        await sglang_engine.abandon_update()
        with pytest.raises(EngineError, match="no weights of a known version"):
            await sglang_engine.generate(EngineRequest(PROMPTS, SAMPLING))
        await update(sglang_engine, pusher, model, 51)
        await agrees(sglang_engine, model, 51)

    asyncio.run(scenario())


def test_sending_without_an_open_update_is_refused(sglang_engine: SglangEngine, tiny_path: Path) -> None:
    with pytest.raises(EngineError, match="must run between begin_weight_update"):
        ReadSender(sglang_engine.endpoint, timeout_s=60).send(weights_of(load(tiny_path)))
