"""The start of a server that is cancelled leaves none, though the thread in which it is started goes on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions, SglangServer
from megarl.workers import engine_actor

WAIT_S = 60.0


@pytest.mark.parametrize("is_made", [True, False])
def test_a_server_whose_start_is_cancelled_is_ended(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_made: bool
) -> None:
    """`is_made`: its process is there when the start is cancelled; else it is made after the first attempt to end it."""
    begins, may_make, made, ended = (threading.Event() for _ in range(4))
    end = SglangServer.stop

    def start(server: SglangServer) -> None:
        begins.set()
        may_make.wait(WAIT_S)
        server._process = SimpleNamespace(kill=ended.set)  # type: ignore[assignment]
        made.set()
        ended.wait(WAIT_S)

    def stop(server: SglangServer) -> None:
        end(server)
        may_make.set()

    async def cancelled() -> None:
        opening = asyncio.create_task(SglangEngine.open(ServerOptions(str(tiny_path), tmp_path / "log")))
        try:
            assert await asyncio.to_thread((made if is_made else begins).wait, WAIT_S)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert made.is_set()
            assert ended.is_set()
        finally:
            may_make.set()
            ended.set()

    monkeypatch.setattr(SglangServer, "start", start)
    monkeypatch.setattr(SglangServer, "stop", stop)
    if is_made:
        may_make.set()
    asyncio.run(cancelled())


def test_the_next_start_begins_when_the_cancelled_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    class Kind:
        @classmethod
        async def start(cls, model_path: str, **options: Any) -> str:
            steps.append("begins")
            try:
                await asyncio.sleep(0 if len(steps) > 1 else WAIT_S)
            except asyncio.CancelledError:
                await asyncio.sleep(0)  # it is ended
                await asyncio.sleep(0)
                steps.append("has ended")
                raise
            return "an engine"

    async def started_again() -> str | None:
        first = asyncio.create_task(actor.start(None))
        await asyncio.sleep(0)
        first.cancel()
        await actor.start(None)
        engine: str | None = actor.engine
        return engine

    monkeypatch.setattr(engine_actor, "load_engine", lambda path: Kind)
    monkeypatch.setattr(engine_actor, "end_with_parent", lambda: None)
    actor = engine_actor.EngineActor.__ray_metadata__.modified_class("path", "model", {})
    assert asyncio.run(started_again()) == "an engine"
    assert steps == ["begins", "has ended", "begins"]
