"""Which engine gives its weights to one that comes, under which version, and what happens while the ranks send newer ones."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.staleness_manager import StalenessManager
from megarl.errors import EngineError
from megarl.options.elastic_engines import peers
from megarl.rollout.scheduling.engine_state import EngineState
from megarl.rollout.scheduling.requests import single_turns
from megarl.rollout.scheduling.scheduler import Scheduler
from tests.rollout.fake_engines import FakeEngine, Source, Spelling
from tests.rollout.test_partial_groups import PARAMS


def engine(number: int, version: int | None, *, load: int = 0, is_open: bool = True, **fields: Any) -> EngineState:
    """An engine that is up."""
    state = EngineState(number, handle=None, version=version, load=load, **fields)  # type: ignore[arg-type]
    if is_open:
        state.is_open.set()
    return state


class Run:
    """A run whose engines copy at once, but for those that do not give their weights."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, version: int, *engines: EngineState, refuse: tuple[int, ...] = ()
    ) -> None:
        self.version, self.scheduler, self.refuse = version, SimpleNamespace(engines=[*engines]), refuse
        self.copied: list[tuple[int, int]] = []
        self.during_copies: list[int] = []
        monkeypatch.setattr(peers, "_copy", self.copy)

    def copy(self, rollouts: Any, source: EngineState, actor: Any, version: int) -> bool:
        self.copied.append((source.number, version))
        for newer in self.during_copies:
            self.version = source.version = newer
        self.during_copies = []
        return source.number not in self.refuse

    def newest(self) -> tuple[int | None, int | None]:
        """What an engine that comes gets."""
        return peers.newest_weights(self, None, lambda: False)  # type: ignore[arg-type]


def test_the_least_loaded_engine_with_the_newest_weights_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = engine(0, 7, load=3), engine(1, 6), engine(2, 7, load=1), engine(3, 7, rests=True), engine(4, 7, is_absent=True)
    run = Run(monkeypatch, 7, *engines)
    assert run.newest() == (7, 2)


def test_what_was_newest_when_it_began_is_copied_again_if_it_is_not_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 7, engine(0, 7))
    run.during_copies = [8]
    assert run.newest() == (8, 0)
    assert run.copied == [(0, 7), (0, 8)]


def test_where_none_gives_any_the_ranks_are_left_to_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Run(monkeypatch, 7).newest() == (None, None)
    assert Run(monkeypatch, 7, engine(0, None)).newest() == (None, None)
    run = Run(monkeypatch, 7, engine(0, 7), engine(1, 7, load=1), refuse=(0, 1))
    assert run.newest() == (None, None)
    assert run.copied == [(0, 7), (1, 7)]


def test_it_waits_while_engines_are_given_newer_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    held = engine(0, 7, is_open=False)
    run = Run(monkeypatch, 8, held)

    def end_update() -> None:
        time.sleep(4 * peers.POLL_S)
        held.version = 8
        held.is_open.set()

    threading.Thread(target=end_update).start()
    assert run.newest() == (8, 0)
    assert run.copied == [(0, 8)]


def test_too_few_engines_start_nothing_and_an_engine_that_has_left_is_neither_opened_nor_started_again() -> None:
    engines: list[Any] = [FakeEngine(number) for number in range(2)]
    ask = single_turns(PARAMS, 1, 20.0, Spelling())
    scheduler = Scheduler(engines, StalenessManager(4, 0), ask, dispensable=range(2), restart_deadline_s=1.0)
    try:
        states = scheduler.engines
        states[1].rests = states[1].is_absent = True
        scheduler.is_short = True
        scheduler.resume([0, 1], 0)
        assert [state.version for state in states] == [0, None]
        assert not states[1].is_open.is_set()
        scheduler.open_step(0, Source())
        assert not states[0].requests
        assert scheduler.wait(5.0) is False, "the driver hears that it waits for engines"
        scheduler.fail(1, EngineError("gone"))
        assert states[1].restarting is None

        async def enough() -> None:
            scheduler.is_short = False
            scheduler.dispatch()

        scheduler.thread.run(enough())
        for engine in engines:
            engine.version = 0
        assert scheduler.wait(20.0) is True
        assert len(scheduler.pop_batch().samples) == 4
        assert states[1].sampled_tokens == 0
    finally:
        scheduler.close()
