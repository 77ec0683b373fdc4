"""Two SGLang engines take an update over process groups; one of them is killed in the middle of it."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from megarl.errors import EngineError
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from megarl.weights.pusher import Pusher
from megarl.weights.staging import StagedSlices
from megarl.workers.senders import Membership, open_sender
from tests.rollout.tiny import CONNECTIONS, PROMPTS, largest_difference, load, weights_of

SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.7)


def connect(pusher: Pusher, number: int, engine: SglangEngine) -> None:
    """A process group with this engine alone."""
    member = Membership(connection=next(CONNECTIONS))
    pusher.connect(number, partial(open_sender, engine.endpoint, "process_group", member, 60.0))


@pytest.mark.slow
def test_an_engine_killed_in_the_middle_of_an_update_answers_again_only_after_a_whole_one(
    sglang_engine: SglangEngine, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ServerOptions(
        str(tiny_path), tmp_path / "server.log", threads=1, max_total_tokens=1024, max_running_requests=8, start_timeout_s=240
    )

    async def agrees(engine: SglangEngine, model: Any, version: int) -> None:
        groups = await engine.generate(EngineRequest(PROMPTS, SAMPLING, n=2))
        assert largest_difference(model, PROMPTS, groups, 0.7) < 1e-5
        assert {v for group in groups for one in group for v in one.weight_versions} == {version}

    async def update(engines: dict[int, SglangEngine], pusher: Pusher, model: Any, version: int) -> dict[int, Any]:
        for engine in engines.values():
            await engine.begin_update(version)
        return await asyncio.to_thread(pusher.push, iter(weights_of(model)), dict.fromkeys(engines))

    async def scenario() -> None:
        victim = await SglangEngine.open(options, initial_version=0)
        engines, pusher = {0: sglang_engine, 1: victim}, Pusher(load_bytes=2**15)
        try:
            for number, engine in engines.items():
                await asyncio.to_thread(connect, pusher, number, engine)
            assert pusher.unreachable == {}
            delivered: list[int] = []
            deliver, to_other = pusher.senders[1].deliver, mock.Mock(side_effect=pusher.senders[0].deliver)
            monkeypatch.setattr(pusher.senders[0], "deliver", to_other)

            def dying(staged: StagedSlices) -> None:
                if len(delivered) == 3:
                    assert victim.server.pid is not None
                    psutil.Process(victim.server.pid).kill()
                    while victim.server.alive:  # its sockets take requests until its memory is given back
                        time.sleep(0.01)
                delivered.append(len(staged.pieces))
                deliver(staged)

            monkeypatch.setattr(pusher.senders[1], "deliver", dying)
            new = load(tiny_path, seed=8)
            pushed = await update(engines, pusher, new, 31)
            assert len(delivered) == 4 < to_other.call_count  # it was sent nothing more
            assert victim.endpoint.url in pushed[1].error
            assert pushed[0].error is None
            await sglang_engine.end_update(31, pushed[0].checksums)
            await agrees(sglang_engine, new, 31)
            with pytest.raises(EngineError):
                await victim.end_update(31, pushed[0].checksums)
            for is_new in (False, True):
                if is_new:
                    await victim.stop()
                    victim = await SglangEngine.open(options)
                assert victim.weight_version is None
                with pytest.raises(EngineError, match="no weights of a known version"):
                    await victim.generate(EngineRequest(PROMPTS, SAMPLING))
            await asyncio.to_thread(connect, pusher, 1, victim)
            again = await update({1: victim}, pusher, new, 31)
            await victim.end_update(31, again[1].checksums)
            await agrees(victim, new, 31)
            pusher.disconnect(0)
        finally:
            await victim.stop()

    asyncio.run(scenario())
