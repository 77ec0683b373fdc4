"""What comes late from a site, or late to it, costs neither the run nor the site anything."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.options.elastic_engines.sites import gate, joining
from megarl.options.elastic_engines.sites.far_engine import FarEngine
from megarl.options.elastic_engines.sites.far_members import FarMembers
from megarl.options.elastic_engines.sites.joining import NotThereError, SiteEngine, SiteSettings
from megarl.options.elastic_engines.sites.wire import Joined, Joining, ModelFacts, Order, Orders, Poll, sent_request
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.version import __version__
from tests.options.elastic_engines.test_members import WAIT_S
from tests.options.elastic_engines.test_members import site as site  # a fixture
from tests.options.elastic_engines.test_sites import TOKEN, FarSite, TwoSites
from tests.options.elastic_engines.test_sites import two as two  # a fixture

pytest.importorskip("zstandard")


def test_a_site_that_was_told_to_try_again_is_not_admitted_later(two: TwoSites, monkeypatch: pytest.MonkeyPatch) -> None:
    admit, is_told, is_seen_to = FarMembers._admit, threading.Event(), threading.Event()
    ask_to_join = FarMembers.ask_to_join
    errors: list[Exception] = []
    asked: list[FarEngine] = []

    def noted(self: FarMembers, engine: FarEngine) -> None:
        asked.append(engine)
        ask_to_join(self, engine)

    def busy(self: FarMembers, engine: FarEngine) -> None:
        is_told.wait(WAIT_S)
        try:
            admit(self, engine)
        except Exception as error:
            errors.append(error)
            raise
        finally:
            is_seen_to.set()

    with monkeypatch.context() as while_busy:
        while_busy.setattr(gate, "ADMITTED_S", 0.05)
        while_busy.setattr(FarMembers, "_admit", busy)
        while_busy.setattr(FarMembers, "ask_to_join", noted)
        hasty = FarSite(two.url, two.model, patience_s=0.0)
        hasty.wait()
        assert str(hasty.error).endswith("the run is busy; try again")
        assert two.far.numbers == set()
        patient = FarSite(two.url, two.model, patience_s=WAIT_S)
        two.wait_until(lambda: len(asked) >= 3)
        is_told.set()
        assert is_seen_to.wait(WAIT_S)
        while_busy.undo()
        two.sites.append(patient)
        two.wait_until(lambda: len(two.far.numbers) == 1)
    assert errors == []
    two.site.update(0)
    two.wait_until(lambda: len(two.site.there) == 2)
    assert two.site.running._error is None


def test_a_poll_that_the_site_gave_up_does_not_take_back_what_it_has_said_since(
    two: TwoSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes on with it: it ends later, when there was nothing to tell."""
    versions: list[int | None] = []
    hear, joined = FarEngine.hear, list[Joined]()

    def heard(self: FarEngine, poll: Poll) -> Any:
        orders = hear(self, poll)
        versions.append(self.version)
        return orders

    async def asks_anew() -> None:
        run = joining.RunAnswers(two.url, TOKEN, 1.0)
        try:
            joined.append(await run.ask("/join", Joined, Joining(__version__, two.far.facts().model, "site-b")))
            before = asyncio.create_task(run.ask("/orders", Orders, Poll(joined[0].key, 1, 0, None, None, 0, 0)))
            while not versions:
                await asyncio.sleep(0.005)
            before.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await before
            await run.ask("/orders", Orders, Poll(joined[0].key, 2, 0, 0, None, 0, 0))
        finally:
            await run.close()

    monkeypatch.setattr(FarEngine, "hear", heard)
    monkeypatch.setattr(FarMembers, "_write_if_needed", lambda self: None)  # so that there is nothing to tell
    asyncio.run(asks_anew())
    two.wait_until(lambda: len(versions) >= 4)
    assert versions == [None, 0, 0, 0]


def test_a_version_that_is_removed_while_a_site_asks_for_it_is_not_there(two: TwoSites) -> None:
    two.site.update(0)
    two.come()
    path = two.far.store.path

    def removed(version: int, part: str) -> Path | None:
        found = path(version, part)
        assert found is not None
        shutil.rmtree(found.parent)
        return found

    async def fetched() -> None:
        run = joining.RunAnswers(two.url, TOKEN, 1.0)
        try:
            await run.index(0)
        finally:
            await run.close()

    two.far.store.path = removed  # type: ignore[method-assign]
    with pytest.raises(NotThereError):
        asyncio.run(fetched())


def test_work_of_before_a_site_joined_again_is_not_taken_for_the_new_order_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers of orders begin anew; an engine may be slow to end what was cancelled."""

    class Run:
        async def ask(self, path: str, *_: Any) -> Joined:
            return Joined(1, "key", "life")

    class Slow:
        def __init__(self) -> None:
            self.begun, self.ended, self.may_end = 0, 0, asyncio.Event()

        async def generate(self, request: EngineRequest) -> Any:
            self.begun += 1
            try:
                await asyncio.Event().wait()
            finally:
                await self.may_end.wait()
                self.ended += 1

    async def until(there: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not there():
                await asyncio.sleep(0)

    async def joins_again() -> None:
        slow = Slow()
        settings = SiteSettings("http://run", TOKEN, "site-b", 1.0, lambda line: None)
        site = SiteEngine(Run(), slow, "model", ModelFacts("", "", ""), settings)  # type: ignore[arg-type]
        site._is_open.set()
        order = Order(1, "generate", request=sent_request(EngineRequest([[1]], SamplingParams(4))))
        for begun in (1, 2):
            await site._join()
            site._follow(order)
            await until(lambda begun=begun: slow.begun == begun)  # type: ignore[misc]
        slow.may_end.set()
        await until(lambda: slow.ended == 1)
        await asyncio.sleep(0)  # who waits for the task's end hears of it
        site._follow(Order(2, "stop", stop=1))
        await until(lambda: slow.ended == 2)

    monkeypatch.setattr(joining, "ModelTexts", lambda _: None)
    asyncio.run(joins_again())
