"""An engine's process that is stopped is ended and made anew when its engine is to be restarted."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import ray

from megarl.errors import DeadlineError
from megarl.workers import engine_calls
from megarl.workers.engine_calls import EngineCalls


@ray.remote(max_concurrency=100, max_restarts=-1)
class Engine:
    """Answers what `EngineCalls` asks of an engine's actor."""

    async def call(self, method: str) -> int:
        """Every method of the engine says which process it is in."""
        return os.getpid()

    async def endpoint(self) -> None:
        return None

    async def restart(self) -> None:
        return None


def test_a_stopped_engine_is_restarted_in_a_new_process(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "ANSWER_S", 2.0)
    actor = Engine.options(num_cpus=0).remote()
    engine = EngineCalls(actor, 0)

    async def scenario() -> None:
        stopped = await actor.call.remote("health")
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match="engine 0 did not answer 'health' within 2 s") as caught:
            await engine.health(deadline_s=-3)
        assert caught.value.who == "engine 0"
        await engine.restart(60)
        assert await actor.call.remote("health") != stopped

    asyncio.run(scenario())
    ray.kill(actor)
