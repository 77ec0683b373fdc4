"""Engines on the trainer's GPUs, by the scheduler on engines of its test's own: they work between wake and rest alone, and what
they have sampled by then is trained on all the same."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from megarl.core.staleness_manager import StalenessManager
from megarl.data.sample import Prompt
from megarl.errors import EngineError
from megarl.options.lending.turns import LentEngines
from megarl.rollout.engines.protocol import EngineRequest, Generation
from megarl.rollout.scheduling.requests import single_turns
from megarl.rollout.scheduling.scheduler import Scheduler
from tests.rollout.fake_engines import Source, Spelling, check_prompts, finish, give, update
from tests.rollout.test_partial_groups import PARAMS, Book, ContinuingEngine, asking, check_sample

FIXED, LENT = 2, 2


class SleepingEngine(ContinuingEngine):
    """Has memory unless it sleeps or is dead; may refuse to give it up."""

    def __init__(self, number: int, book: Book, seconds: Callable[[], float]) -> None:
        super().__init__(number, book, seconds)
        self.sleeps = self.keeps_memory = False
        self.ends = 0

    @property
    def has_memory(self) -> bool:
        return not self.sleeps and not self.is_dead

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        assert not self.sleeps
        return await super().generate(request)

    async def sleep(self, *, deadline_s: float) -> None:
        self._check()
        assert not self.sleeps, "a second sleep in a row would be a server's end"
        if self.keeps_memory:
            raise EngineError("the server does not give up its memory")
        assert not self.now.total(), "what it works on is stopped first"
        self.sleeps, self.version = True, None

    async def wake(self, *, deadline_s: float) -> None:
        self._check()
        if not self.sleeps:
            raise EngineError("the engine does not sleep")
        self.sleeps = False

    async def wake_cache(self, *, deadline_s: float) -> None:
        self._check()
        assert not self.sleeps

    async def restart(self, deadline_s: float) -> None:
        await super().restart(deadline_s)
        self.sleeps = False

    async def end(self) -> None:
        self.is_dead, self.sleeps = True, False
        self.ends += 1


@pytest.fixture
def opened() -> Iterator[Callable[..., tuple[Scheduler, LentEngines]]]:
    schedulers: list[Scheduler] = []

    def make(
        engines: Sequence[SleepingEngine], manager: StalenessManager, ask: Any = None, **options: Any
    ) -> tuple[Scheduler, LentEngines]:
        """The last `LENT` engines are lent, and asleep."""
        lent = range(len(engines) - LENT, len(engines))
        ask = ask or single_turns(PARAMS, 2, 20.0, Spelling())
        schedulers.append(Scheduler(engines, manager, ask, cuts=True, keeps_turns=True, dispensable=lent, **options))
        schedulers[-1].resume(range(len(engines)), 0)
        found = LentEngines(schedulers[-1], lent, restart_s=10.0, call_s=5.0)
        found.rest()
        return schedulers[-1], found

    yield make
    for scheduler in schedulers:
        scheduler.close()


def lend(scheduler: Scheduler, engines: Sequence[SleepingEngine], lent: LentEngines, version: int) -> None:
    """As an update of the lent engines does."""
    lent.wake()
    give(scheduler, engines, lent.awake, version)


def told_and_kept(scheduler: Scheduler) -> set[int]:
    """Tokens that are in groups which were not consumed."""
    kept = {t for group in scheduler.partial._groups.values() for turn in group._turns.values() for t in turn.response_ids}
    return kept | {t for group in scheduler._groups.values() for one in group for t in one.response_ids}


@pytest.mark.parametrize("episodes", [False, True], ids=["single turns", "episodes"])
@pytest.mark.parametrize(("staleness", "over_sample", "seed"), [(1, 0, 1), (2, 0, 2), (1, 3, 3), (2, 2, 4)])
def test_a_run_that_lends_trains_on_every_prompt_once_never_too_old_and_throws_nothing_away(
    opened: Any, staleness: int, over_sample: int, seed: int, episodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines die while they work, in updates and asleep; some keep their memory; the driver is lost and resumed."""
    monkeypatch.setattr("megarl.rollout.scheduling.restarts.FAILURES", 1000)
    luck, book = random.Random(seed), Book()
    engines = [SleepingEngine(number, book, lambda: luck.random() ** 3 / 20) for number in range(FIXED + LENT)]
    ask = asking(episodes=episodes)

    def begin() -> tuple[Scheduler, LentEngines]:
        manager = StalenessManager(6, staleness, over_sample)
        return opened(engines, manager, ask, groups_per_engine=3, groups_per_request=1 + seed % 2)

    def trainer_has_its_gpus() -> bool:
        return not any(engine.has_memory or engine.now.total() for engine in engines[FIXED:])

    scheduler, lent = begin()
    source, seen, trained = Source(), list[int](), set[int]()
    by_lent, suspended = 0, 0
    for version in range(16):
        if version:
            assert trainer_has_its_gpus()
            fixed = [engine.number for engine in scheduler.engines[:FIXED] if engine.is_up]
            update(scheduler, engines, fixed, version, luck)
        scheduler.open_step(version, source)
        if luck.random() < 0.3:
            luck.choice(engines).is_dead = True
        if luck.random() < 0.8:
            lend(scheduler, engines, lent, version)
        engines[-1].keeps_memory = luck.random() < 0.2
        if luck.random() < 0.3:
            luck.choice(engines).is_dead = True
        for group in finish(scheduler, engines, version):
            seen.append(int(group[0].group_id[1:]))
            for sample in group:
                check_sample(sample, book)
                tokens = {t for t, own in zip(sample.response_ids, sample.sampled_mask, strict=True) if own}
                assert not trained & tokens
                trained |= tokens
                assert version - staleness <= sample.weight_versions[0] <= sample.weight_versions[-1] <= version
                assert sample.weight_versions == sorted(sample.weight_versions)
        time.sleep(luck.random() / 200)  # rewards
        lent.rest()
        assert trainer_has_its_gpus()
        by_lent = max(by_lent, lent.sampled_tokens)
        if not over_sample:  # else groups that would be too old begin anew, as in every run
            assert scheduler.partial.aborted_tokens == 0
            assert book.told - trained <= told_and_kept(scheduler)
        time.sleep(luck.random() / 100)  # training
        suspended = max(suspended, scheduler.manager.suspended)
        if version % 5 == 4:
            state = json.loads(json.dumps(scheduler.state_dict()))
            scheduler.close()
            for engine in engines:
                engine.is_dead = engine.sleeps = engine.keeps_memory = False
                engine.version = 0
            scheduler, lent = begin()
            book.told &= trained  # what was finished, or cut before, is read from the checkpoint
            book.told |= {t for group in state["samples"] for one in group for t in one["response_ids"] if t > 0}
            book.told |= {t for group in state["partial"].values() for turn in group.values() for t in turn["response_ids"]}
            scheduler.load_state_dict(state)
            scheduler.empty()
    check_prompts(scheduler, source, seen, 16 * 6)
    if not over_sample:
        assert seen == list(range(16 * 6))
    assert by_lent > 0
    assert suspended > 0, "lent engines had something under way when they were put to rest"


def test_what_a_lent_engine_has_of_a_group_goes_on_on_another_engine(opened: Any) -> None:
    book = Book()
    engines = [SleepingEngine(number, book, lambda: 0.4) for number in range(3)]
    scheduler, lent = opened(engines, StalenessManager(3, 1), groups_per_engine=1)
    prompts = iter(Prompt(f"r{i}", f"g{i}", [5, 5 + i], "") for i in range(100))
    assert [engine.rests for engine in scheduler.engines] == [False, True, True]
    scheduler.open_step(0, lambda count: [next(prompts) for _ in range(count)])
    assert lent.work_for(0) == 5, "of six groups one is under way"
    lend(scheduler, engines, lent, 0)
    while not (own := [t for t in book.behind if engines[2].now["g2"] and book.behind[t][:2] == (5, 7)]):
        time.sleep(0.001)
    lent.rest()
    assert engines[1].sleeps
    assert engines[2].sleeps
    assert lent.sampled_tokens > 0
    assert scheduler.manager.suspended >= 1
    engines[0].seconds = lambda: 0.005
    batch = finish(scheduler, engines)
    [group] = [group for group in batch if group[0].group_id == "g2"]
    for sample in group:
        check_sample(sample, book)
    assert {*own} <= {token for sample in group for token in sample.response_ids}
    assert scheduler.partial.aborted_tokens == 0


def test_an_engine_that_died_asleep_is_told_once_and_works_again_when_it_is_woken(opened: Any) -> None:
    said: list[str] = []
    engines = [SleepingEngine(number, Book(), lambda: 0.01) for number in range(3)]
    scheduler, lent = opened(engines, StalenessManager(3, 1), groups_per_engine=1, say=said.append)
    engines[2].is_dead = True
    scheduler.open_step(0, Source())
    finish(scheduler, engines)
    assert said == []
    assert engines[2].restarts == 0, "it takes no memory while the trainer works"
    lend(scheduler, engines, lent, 0)
    assert said == ["engine 2 failed: the process is gone"]
    while 2 not in scheduler.without_weights:
        time.sleep(0.001)
    give(scheduler, engines, [2], 0)
    assert engines[2].restarts == 1
    lent.rest()
    assert engines[2].sleeps
    lend(scheduler, engines, lent, 0)
    assert said == ["engine 2 failed: the process is gone"]


def test_an_engine_that_keeps_its_memory_is_ended_and_started_anew_when_it_is_woken(opened: Any) -> None:
    said: list[str] = []
    engines = [SleepingEngine(number, Book(), lambda: 0.01) for number in range(3)]
    scheduler, lent = opened(engines, StalenessManager(3, 1), groups_per_engine=1, say=said.append)
    lend(scheduler, engines, lent, 0)
    engines[1].keeps_memory = True
    lent.rest()
    assert (engines[1].ends, engines[1].has_memory, engines[2].sleeps) == (1, False, True)
    engines[1].keeps_memory = False
    lend(scheduler, engines, lent, 0)
    while 1 not in scheduler.without_weights:
        time.sleep(0.001)
    give(scheduler, engines, [1], 0)
    lent.rest()
    assert engines[1].sleeps
    assert said == ["engine 1 failed: the server does not give up its memory"]


def test_the_run_goes_on_without_a_lent_engine_that_cannot_be_started(opened: Any) -> None:
    said: list[str] = []
    engines = [SleepingEngine(number, Book(), lambda: 0.005) for number in range(3)]
    scheduler, lent = opened(engines, StalenessManager(3, 1), groups_per_engine=1, say=said.append)
    engines[2].is_dead, engines[2].starts_that_fail = True, 100
    source = Source()
    for version in range(3):
        give(scheduler, engines, [0], version)
        scheduler.open_step(version, source)
        lend(scheduler, engines, lent, version)
        assert [group[0].group_id for group in finish(scheduler, engines, version)] == [
            f"g{3 * version + place}" for place in range(3)
        ]
        lent.rest()
    assert said[-1] == "engine 2 did not restart in 4 tries: the server did not answer; the run goes on without it"
    assert (engines[2].ends, lent.awake, engines[1].restarts) == (1, [], 0)
    lent.wake()
    assert lent.awake == [1]


def test_what_was_asked_of_a_lent_engine_is_asked_of_another(opened: Any) -> None:
    engines = [SleepingEngine(number, Book(), lambda: 0.2) for number in range(3)]
    scheduler, lent = opened(engines, StalenessManager(3, 1), groups_per_engine=1)
    answers = scheduler.ask(Source()(3), scheduler.generate_groups, 1)
    assert lent.work_for(0, answers) == 2
    lend(scheduler, engines, lent, 0)
    assert lent.work_for(0, answers) == 0
    lent.rest()
    for engine in engines:
        engine.seconds = lambda: 0.01
    assert scheduler.wait(10.0, answers)
    assert [answer.result()[0][0].group_id for answer in answers] == ["g0", "g1", "g2"]
    assert lent.work_for(0, answers) == 0


class SlowToFail(SleepingEngine):
    """Takes its time to say that it is not well, and to start."""

    async def health(self, *, deadline_s: float) -> None:
        await asyncio.sleep(0.3)
        await super().health(deadline_s=deadline_s)

    async def restart(self, deadline_s: float) -> None:
        await asyncio.sleep(0.3)
        await super().restart(deadline_s)


@pytest.mark.parametrize("is_noticed", [False, True], ids=["while it is looked at", "while it is started anew"])
def test_an_engine_that_died_just_before_it_was_put_to_rest_takes_no_memory_of_the_trainer(
    opened: Any, is_noticed: bool
) -> None:
    said: list[str] = []
    engines = [SlowToFail(number, Book(), lambda: 0.05) for number in range(3)]
    scheduler, lent = opened(engines, StalenessManager(3, 1), groups_per_engine=1, say=said.append)
    scheduler.open_step(0, Source())
    lend(scheduler, engines, lent, 0)
    while not engines[2].now.total():
        time.sleep(0.001)
    engines[2].is_dead = True
    while scheduler.engines[2].requests or (is_noticed and scheduler.engines[2].restarting is None):
        time.sleep(0.001)
    lent.rest()
    assert not engines[2].has_memory
    assert engines[2].restarts == (1 if is_noticed else 0), "the trainer waits for a start that is under way"
    time.sleep(0.8)  # what was under way would be over
    assert not engines[2].has_memory
    assert scheduler.engines[2].restarting is None
    assert len(said) == 1
    lend(scheduler, engines, lent, 0)
    while not is_noticed and 2 not in scheduler.without_weights:
        time.sleep(0.001)
    give(scheduler, engines, [2], 0)
    assert scheduler.engines[2].version == 0
    assert len(said) == 1
