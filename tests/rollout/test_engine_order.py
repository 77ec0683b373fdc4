"""The engine that is sent work next: the least loaded that has room; what makes room; and a loop that is late."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megarl.core.staleness_manager import StalenessManager
from megarl.data.sample import Prompt, Sample
from megarl.errors import DeadlineError, EngineError
from megarl.rollout.engines.capacity import EndedResponses, EngineCapacity
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.engines.sglang.external import ExternalServer
from megarl.rollout.episodes import EpisodeContext, Episodes
from megarl.rollout.scheduling.engine_order import CLUTTER, EngineOrder
from megarl.rollout.scheduling.engine_state import EngineState, PromptRequest, prompt_key
from megarl.rollout.scheduling.episode_requests import episode_groups
from megarl.rollout.scheduling.loop_thread import LoopThread
from megarl.rollout.scheduling.scheduler import AT_ONCE, Scheduler
from tests.rollout.fake_engines import FakeEngine, Source, Spelling, finish, schedulers

PARAMS = SamplingParams(max_new_tokens=4)


@pytest.fixture
def open_scheduler() -> Iterator[Callable[..., Scheduler]]:
    with schedulers(PARAMS) as make:
        yield make


def until(is_so: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def request(prompt_tokens: int = 1) -> PromptRequest:
    async def nothing(_: Any) -> list[list[Sample]]:
        return []

    return PromptRequest([Prompt("r", "g", [0] * prompt_tokens, "")], nothing, 1)


class Book:
    """Engines whose order is kept by heaps, and is known by looking at all of them: 6 groups of 4 responses each at most."""

    def __init__(self, count: int, seed: int) -> None:
        self.luck, self.calls = random.Random(seed), 0
        self.engines = [EngineState(number, handle=None) for number in range(count)]  # type: ignore[arg-type]
        self.order = EngineOrder(self.engines, self.called, 6, 4, reports=False)
        self.tasks: list[tuple[EngineState, Any]] = []

    def called(self) -> None:
        self.calls += 1

    def first(self, newer_than: int) -> EngineState | None:
        free = [
            engine
            for engine in self.engines
            if engine.version is not None
            and engine.version > newer_than
            and engine.is_open.is_set()
            and len(engine.requests) < 6
        ]
        return min(free, key=lambda engine: (sum(one.left for one in engine.requests.values()), engine.number), default=None)

    def act(self) -> None:
        what, engine = self.luck.random(), self.luck.choice(self.engines)
        if what < 0.2:
            engine.is_open.set()
            engine.version = self.luck.randrange(3)
            self.order.changed(engine)
        elif what < 0.25:
            engine.is_open.clear()
            self.order.changed(engine)
        elif what < 0.6:
            if (chosen := self.order.first()) is not None:
                self.tasks.append((chosen, object()))
                self.order.take(*self.tasks[-1], request())
        elif what < 0.8 and self.tasks:
            of, task = self.luck.choice(self.tasks)
            of.requests[task].asked.count_ended(self.luck.randint(1, 3))  # type: ignore[union-attr]
        elif self.tasks:
            of, task = self.tasks.pop(self.luck.randrange(len(self.tasks)))
            assert self.order.drop(of, task) is not None
            assert self.order.drop(of, task) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_heaps_name_the_engine_that_looking_at_all_of_them_does(seed: int) -> None:
    book = Book(5, seed)
    for _ in range(1500):
        book.act()
        for newer_than in (-1, 0, 1, 2):
            assert book.order.first(newer_than) is book.first(newer_than)
        for engine in book.engines:
            assert engine.load == sum(asked.left for asked in engine.requests.values())
            assert engine.groups == len(engine.requests)
    assert book.calls
    for engine in book.engines * 100:  # nobody asks who is first meanwhile
        task: Any = object()
        book.order.take(engine, task, request())
        book.order.drop(engine, task)
    assert all(len(heap) <= len(book.engines) * CLUTTER for heap in book.order._heaps.values())


def test_an_engine_is_sent_the_responses_and_tokens_that_it_holds_and_one_group_whatever_it_says() -> None:
    [engine] = (book := Book(1, 0)).engines
    engine.version, engine.capacity = 0, EngineCapacity(responses=10, tokens=1000)
    engine.is_open.set()
    taken: list[Any] = []

    def fill(prompt_tokens: int) -> int:
        """Send it groups while it has room; returns how many it has then."""
        while book.order.first() is not None:
            taken.append(object())
            book.order.take(engine, taken[-1], request(prompt_tokens))
        return len(taken)

    def empty() -> None:
        while taken:
            book.order.drop(engine, taken.pop())

    book.order.changed(engine)
    assert fill(1) == 3  # 8 responses leave room, 12 do not
    engine.requests[taken[0]].asked.count_ended(3)  # type: ignore[union-attr]
    assert book.order.first() is engine
    assert book.calls == 1
    empty()
    assert fill(400) == 3  # a prompt counts once for its group: 800 tokens leave room, 1200 do not
    empty()
    answered = Generation([1] * 150, [0.0] * 150, [0] * 150, "stop")
    book.order._observe([Prompt("r", "g", [0] * 10, "")], EngineRequest([[0] * 10], PARAMS), [[answered, answered]])
    assert fill(1) == 2  # 4 responses of 150 tokens leave room, 8 do not
    empty()
    engine.capacity = EngineCapacity(tokens=5)
    book.order.changed(engine)
    assert fill(100) == 1


class ReportingEngine(FakeEngine):
    """Says that a response of a group has ended when it is told to; groups end once `lets_go` is set."""

    def __init__(self, holds: EngineCapacity) -> None:
        super().__init__(0)
        self.holds, self.ended, self.lets_go = holds, EndedResponses(), asyncio.Event()

    async def capacity(self, *, deadline_s: float) -> EngineCapacity:
        return self.holds

    async def take_ended(self, *, deadline_s: float) -> list[str]:
        return await self.ended.take()

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        self.answered += request.keys or ()
        await self.lets_go.wait()
        return await super().generate(request)


def test_a_group_makes_room_as_its_responses_end(open_scheduler: Any) -> None:
    engine = ReportingEngine(EngineCapacity(responses=4))
    scheduler = open_scheduler([engine], StalenessManager(8, 0), samples_per_group=2, reports=True)
    scheduler.thread.run(scheduler.order.ask_capacities())
    scheduler.open_step(0, Source())
    until(lambda: engine.answered == ["g0", "g1"])
    scheduler.thread.loop.call_soon_threadsafe(engine.ended.note, "g0")
    until(lambda: engine.answered == ["g0", "g1", "g2"])  # three responses were under way, and five are
    assert (scheduler.engines[0].load, scheduler.engines[0].groups) == (5, 3)
    scheduler.thread.loop.call_soon_threadsafe(engine.lets_go.set)
    assert len(finish(scheduler, [engine])) == 8
    assert (scheduler.engines[0].load, scheduler.engines[0].prompt_tokens, scheduler.order._keyed) == (0, 0, {})


class Reports:
    """The calls to an engine that says once that a response has ended."""

    def __init__(self, key: str) -> None:
        self.ended, self.is_counted = [key], asyncio.Event()

    async def take_ended(self, *, deadline_s: float) -> list[str]:
        if not self.ended:
            self.is_counted.set()
            await asyncio.Event().wait()
        return [self.ended.pop()]


def test_what_an_engine_reports_late_of_a_group_that_went_to_another_one_is_not_counted_there() -> None:
    async def loads() -> list[int]:
        asked, said, tasks = request(), list[int](), [object(), object()]
        handles: list[Any] = [Reports(prompt_key(asked.prompts[0])) for _ in range(2)]
        engines = [EngineState(number, handle) for number, handle in enumerate(handles)]
        order = EngineOrder(engines, lambda: None, 6, 4, reports=True)
        order.take(engines[0], tasks[0], asked)  # type: ignore[arg-type]
        order.drop(engines[0], tasks[0])  # type: ignore[arg-type]
        order.take(engines[1], tasks[1], asked)  # type: ignore[arg-type]
        for engine, handle in zip(engines, handles, strict=True):
            engine.version = 0
            order.watch(engine)
            await asyncio.wait_for(handle.is_counted.wait(), 30)
            said.append(engines[1].load)
        return said

    assert asyncio.run(loads()) == [4, 3]


def test_an_engine_that_comes_back_is_asked_anew_which_responses_have_ended(open_scheduler: Any) -> None:
    engine = ReportingEngine(EngineCapacity())
    scheduler = open_scheduler([engine], StalenessManager(2, 0), samples_per_group=2, reports=True)
    before = scheduler.engines[0].watch
    assert before is not None
    scheduler.fail(0, EngineError("it is gone"))
    until(lambda: bool(scheduler.without_weights))
    until(before.done)
    scheduler.hold([0])
    scheduler.resume([0], 0)
    assert scheduler.engines[0].watch not in (None, before)


def test_an_episode_that_has_ended_makes_room(open_scheduler: Any) -> None:
    ends = asyncio.Event()

    async def slow_second(prompt: Prompt, number: int, sample: Any, context: Any) -> Sample:
        answer = await sample(prompt.prompt_ids, 4)
        if number:
            await ends.wait()
        name, ids = prompt.group_id, answer.response_ids
        return Sample(f"{name}/{number}", name, name, [0], ids, [1] * len(ids), [0.0] * len(ids), [0] * len(ids), "stop")

    engine = FakeEngine(0)
    ask = episode_groups(Episodes(slow_second, EpisodeContext(Spelling(), 8, 8)), PARAMS, 2, 20.0)
    scheduler = open_scheduler([engine], StalenessManager(3, 0), ask, samples_per_group=2)
    scheduler.engines[0].capacity = EngineCapacity(responses=2)
    scheduler.open_step(0, Source())
    until(lambda: scheduler.manager.count("in_flight") == 2)  # one response of each is under way
    scheduler.thread.loop.call_soon_threadsafe(ends.set)
    assert len(finish(scheduler, [engine])) == 3


def test_starting_thousands_of_groups_leaves_the_loop_time_for_others(open_scheduler: Any) -> None:
    engines, groups = [FakeEngine(number, lambda: 30.0) for number in range(4)], 6 * AT_ONCE
    scheduler = open_scheduler(engines, StalenessManager(groups, 0), groups_per_engine=groups)
    seen = {0}

    async def look() -> None:
        while (count := scheduler.manager.count("in_flight")) < groups:
            seen.add(count)
            await asyncio.sleep(0)

    looking = asyncio.run_coroutine_threadsafe(look(), scheduler.thread.loop)
    scheduler.open_step(0, Source())
    looking.result(30)
    assert seen == {AT_ONCE * passes for passes in range(6)}
    assert scheduler.thread.run(scheduler.work_for(0)) == 0
    assert [engine.groups for engine in scheduler.engines] == [groups // 4] * 4


def test_a_loop_that_is_late_says_what_it_is_busy_with(tmp_path: Any) -> None:
    file = tmp_path / "environment.py"
    file.write_text("import time\nasync def episode():\n    time.sleep(0.5)\n")
    users: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), users)
    thread = LoopThread("test")

    async def nothing() -> None: ...

    async def for_ever() -> None:
        await asyncio.Event().wait()

    try:
        with pytest.raises(DeadlineError, match="did not finish 'for_ever' within 0 s, and has nothing else to do"):
            thread.run(for_ever(), 0.1)
        asyncio.run_coroutine_threadsafe(users["episode"](), thread.loop)
        with pytest.raises(DeadlineError, match=r"it is still in 'episode' \(.*environment.py, line 3\), which blocks it"):
            thread.run(nothing(), 0.2)
        thread.run(nothing())
        ours = ExternalServer("http://127.0.0.1:9", None, 0.2)
        thread.loop.call_soon_threadsafe(ours.start)
        with pytest.raises(DeadlineError, match=r"its own '\w+' \(.*came to 'nothing'; no episode of yours blocks it"):
            thread.run(nothing(), 0.2)
        thread.run(nothing())
    finally:
        thread.close()
