"""The driver's part: who is told of which engine that prefills, in which order updates begin, and one that dies unseen.

Actors are stand-ins; the scheduler is the real one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from megarl.core.staleness_manager import StalenessManager
from megarl.errors import EngineError
from megarl.options.disaggregation import pairing
from megarl.options.disaggregation.client import PrefillServer
from megarl.options.disaggregation.pairing import Pairing
from megarl.rollout.engines.capacity import EngineCapacity
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.scheduling.requests import single_turns
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.workers.engine_calls import EngineCalls
from tests.rollout.fake_engines import FakeEngine, Source, Spelling, finish, serving


class Reference:
    """Ray's reference to an answer that `work` makes in a loop."""

    def __init__(self, work: Any) -> None:
        self._task = asyncio.ensure_future(work)

    def future(self) -> Future[Any]:
        done: Future[Any] = Future()

        def pass_on(task: asyncio.Task[Any]) -> None:
            error = task.exception()
            done.set_exception(error) if error is not None else done.set_result(task.result())

        self._task.add_done_callback(pass_on)
        return done


class Method:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *arguments: Any, **keywords: Any) -> Reference:
        return Reference(self._method(*arguments, **keywords))


class Actor(FakeEngine):
    """An engine's actor: the methods that the scheduler and the pairing call, by name."""

    def __init__(self, number: int, log: list[str]) -> None:
        super().__init__(number)
        self.log, self.starts = log, 0
        self.known: list[list[PrefillServer]] = []
        self.seconds_to_close = 0.0
        plain_restart = self.restart

        async def again() -> None:
            self.starts += 1
            await plain_restart(0)

        async def there() -> None:
            return None

        self.call, self.restart = Method(self._call), Method(again)  # type: ignore[assignment]
        self.endpoint, self.generate = Method(there), Method(super().generate)  # type: ignore[assignment]

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self.is_dead:
            raise EngineError("the server ended with exit code -9")
        if method == "door":
            return PrefillServer(0, self.version or 0, f"http://{self.number}/{self.starts}", "token", "host", 1)
        if method == "meet":
            self.known.append([*arguments[0]])
        if method == "begin_update":
            self.log.append(f"{self.number} begins")
            await asyncio.sleep(self.seconds_to_close)
            self.log.append(f"{self.number} is closed")
        return None


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def actors(log: list[str]) -> list[Actor]:
    """Two that prefill, and two that decode."""
    return [Actor(number, log) for number in range(4)]


@pytest.fixture
def scheduler(actors: list[Actor], monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    monkeypatch.setattr(pairing, "AGAIN_S", 0.2)
    params = SamplingParams(max_new_tokens=2)
    handles = [EngineCalls(actor, actor.number) for actor in actors]
    generate = single_turns(params, 2, 30.0, Spelling())
    opened = Scheduler(handles, StalenessManager(8, 0, 0), generate, reports=True, restart_deadline_s=30.0)
    paired = Pairing(opened, 2)
    opened.resume(range(4), 0)
    yield opened
    paired.close()
    opened.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so, ten seconds at most."""
    ends_at = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends_at, "it never came about"
        time.sleep(0.01)


def urls(actor: Actor) -> list[str]:
    return [server.url for server in actor.known[-1]] if actor.known else []


def test_groups_go_to_engines_that_decode_alone_and_these_know_the_others(scheduler: Scheduler, actors: list[Actor]) -> None:
    until(lambda: all(urls(actor) == ["http://0/0", "http://1/0"] for actor in actors[2:]))
    assert [server.number for server in actors[2].known[-1]] == [0, 1]
    assert actors[0].known == actors[1].known == []
    scheduler.open_step(0, Source())
    assert len(finish(scheduler, actors)) == 8
    assert [len(actor.answered) for actor in actors[:2]] == [0, 0]
    assert sum(len(actor.answered) for actor in actors[2:]) == 8
    assert all(actor.answered for actor in actors[2:])


def test_an_engine_that_says_it_takes_no_requests_gets_none(actors: list[Actor], log: list[str]) -> None:
    params = SamplingParams(max_new_tokens=2)
    handles = [EngineCalls(actor, actor.number) for actor in actors]
    plain = Scheduler(handles, StalenessManager(8, 0, 0), single_turns(params, 2, 30.0, Spelling()))
    plain.engines[1].capacity = EngineCapacity(responses=0)
    plain.resume(range(4), 0)
    plain.open_step(0, Source())
    finish(plain, actors)
    plain.close()
    assert [bool(actor.answered) for actor in actors] == [True, False, True, True]


def test_an_update_begins_with_those_that_decode_and_a_new_version_is_told(
    scheduler: Scheduler, actors: list[Actor], log: list[str]
) -> None:
    actors[2].seconds_to_close, actors[3].seconds_to_close = 0.2, 0.1
    scheduler.hold(range(4))
    answers = scheduler.on_each(range(4), lambda _, engine: engine.begin_update(1, None, deadline_s=5.0), 5.0)
    assert answers == dict.fromkeys(range(4))
    assert log.index("0 begins") > log.index("2 is closed") > log.index("3 is closed")
    assert log.index("1 begins") > log.index("2 is closed")
    for actor in actors:
        actor.version = 1
    scheduler.resume(range(4), 1)
    until(lambda: all({server.version for server in actor.known[-1]} == {1} for actor in actors[2:]))


def test_one_that_is_updated_alone_waits_for_nobody(scheduler: Scheduler, actors: list[Actor], log: list[str]) -> None:
    scheduler.hold([1])
    scheduler.on_each([1], lambda _, engine: engine.begin_update(1, None, deadline_s=5.0), 5.0)
    assert log == ["1 begins", "1 is closed"]


def test_an_engine_that_dies_while_it_prefills_is_started_again_and_then_known_by_its_new_address(
    scheduler: Scheduler, actors: list[Actor]
) -> None:
    until(lambda: urls(actors[2]) == ["http://0/0", "http://1/0"])
    actors[0].is_dead = True
    until(lambda: urls(actors[2]) == ["http://1/0"])
    until(lambda: scheduler.without_weights == [0])
    assert serving(scheduler) == [1, 2, 3]
    scheduler.hold([0])
    actors[0].version = 0
    scheduler.resume([0], 0)
    until(lambda: urls(actors[3]) == ["http://0/1", "http://1/0"])


def test_requests_are_the_engines_own() -> None:
    """The request of a group says nothing of disaggregation: the engine's client makes the pair of it."""
    assert not any("bootstrap" in name for name in EngineRequest.__dataclass_fields__)
