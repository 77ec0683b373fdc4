"""The scheduler on engines of its test's own: nothing is lost when they fail, and the bounds of the manager hold."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megarl.core.staleness_manager import StalenessManager
from megarl.data.sample import Prompt, Sample
from megarl.errors import DeadlineError, EngineError, EpisodeError
from megarl.rollout.engines.protocol import SamplingParams
from megarl.rollout.episodes import EpisodeContext, Episodes
from megarl.rollout.scheduling.episode_requests import episode_groups
from megarl.rollout.scheduling.scheduler import Scheduler
from tests.rollout.fake_engines import FakeEngine, Source, Spelling, check_prompts, finish, give, schedulers, serving, update

PARAMS = SamplingParams(max_new_tokens=4)


@pytest.fixture
def open_scheduler() -> Iterator[Callable[..., Scheduler]]:
    with schedulers(PARAMS) as make:
        yield make


def test_a_batch_comes_in_the_order_of_its_prompts_each_group_from_one_engine(open_scheduler: Any) -> None:
    luck = random.Random(0)
    engines = [FakeEngine(number, lambda: luck.random() / 50) for number in range(3)]
    scheduler = open_scheduler(engines, StalenessManager(12, 0), groups_per_engine=3)
    scheduler.open_step(0, Source())
    batch = finish(scheduler, engines)
    assert [group[0].group_id for group in batch] == [f"g{i}" for i in range(12)]
    assert [[sample.sample_id for sample in group] for group in batch] == [[f"g{i}/0", f"g{i}/1"] for i in range(12)]
    for group in batch:
        assert len({tuple(sample.response_ids) for sample in group}) == 1
    assert all(1 <= engine.most <= 3 for engine in engines)


def test_the_least_loaded_engine_is_next(open_scheduler: Any) -> None:
    slow, fast = FakeEngine(0, lambda: 0.5), FakeEngine(1, lambda: 0.002)
    scheduler = open_scheduler([slow, fast], StalenessManager(10, 0), groups_per_engine=2)
    scheduler.open_step(0, Source())
    finish(scheduler, [slow, fast])
    assert (len(slow.answered), len(fast.answered)) == (2, 8)
    of_slow, of_fast = scheduler.take_spans()
    assert [name for name, _, _ in of_slow] == ["generate"]  # its two requests were under way together
    assert of_slow[0][2] - of_slow[0][1] >= 0.5
    assert of_slow[0][1] - 0.1 < min(begin for _, begin, _ in of_fast) < max(end for _, _, end in of_fast) < of_slow[0][2]


def test_an_engine_that_dies_loses_nothing_and_rejoins_with_weights(open_scheduler: Any) -> None:
    engines = [FakeEngine(0, lambda: 0.02), FakeEngine(1, lambda: 0.02)]
    said: list[str] = []
    scheduler = open_scheduler(engines, StalenessManager(8, 0), groups_per_engine=4, say=said.append)
    scheduler.open_step(0, Source())
    engines[0].is_dead = True
    batch = finish(scheduler, engines)
    [line] = said  # once, however many of its requests noticed
    assert line.startswith("engine 0 failed: ")
    assert [group[0].group_id for group in batch] == [f"g{i}" for i in range(8)]
    assert scheduler.manager.requeued == 4
    scheduler.open_step(0, Source())
    while serving(scheduler) != [0, 1]:
        scheduler.wait(5.0)
        give(scheduler, engines, scheduler.without_weights, 0)
    finish(scheduler, engines)
    assert engines[0].restarts == 1
    assert len(engines[0].answered) >= 1


def test_an_engine_that_failed_during_an_update_does_not_serve_after_it(open_scheduler: Any) -> None:
    engine = FakeEngine(0, lambda: 0.2)
    scheduler = open_scheduler([engine], StalenessManager(1, 1))
    scheduler.open_step(0, Source())
    while not engine.now.total():
        time.sleep(0.001)
    scheduler.hold([0])
    engine.is_dead = True
    while engine.restarts == 0:
        time.sleep(0.001)
    scheduler.resume([0], 1)
    assert serving(scheduler) == []
    give(scheduler, [engine], scheduler.without_weights, 1)
    assert serving(scheduler) == [0]


def test_who_watches_sees_in_which_state_an_engine_is(open_scheduler: Any) -> None:
    engine = FakeEngine(0)
    scheduler = open_scheduler([engine], StalenessManager(1, 0))

    def status() -> tuple[str, int | None, int]:
        seen = scheduler.engines[0].status
        return seen.condition, seen.weight_version, seen.failures

    def until(condition: str) -> None:
        ends_at = time.monotonic() + 30
        while status()[0] != condition:
            assert time.monotonic() < ends_at, status()
            time.sleep(0.001)

    assert status() == ("up", 0, 0)
    scheduler.hold([0])
    assert status() == ("updating", 0, 0)
    give(scheduler, [engine], [0], 1)
    assert status() == ("up", 1, 0)
    engine.is_dead, engine.starts_that_fail = True, 2
    scheduler.open_step(1, Source())
    until("restarting")
    assert status() == ("restarting", None, 1)
    until("waiting")
    give(scheduler, [engine], [0], 1)
    assert status() == ("up", 1, 1)
    assert scheduler.wait(30.0)
    engine.is_dead, engine.starts_that_fail = True, 100
    scheduler.pop_batch()
    scheduler.open_step(1, Source())
    until("dead")
    assert status() == ("dead", None, 2)


def test_no_engine_left_means_waiting_for_the_one_that_is_started_anew(open_scheduler: Any) -> None:
    engine = FakeEngine(0)
    scheduler = open_scheduler([engine], StalenessManager(2, 0))
    engine.is_dead, engine.starts_that_fail = True, 2
    scheduler.open_step(0, Source())
    assert len(finish(scheduler, [engine])) == 2


def test_an_engine_that_does_not_start_again_ends_the_run_in_one_sentence(open_scheduler: Any) -> None:
    engine = FakeEngine(0)
    scheduler = open_scheduler([engine], StalenessManager(2, 0))
    engine.is_dead, engine.starts_that_fail = True, 100
    scheduler.open_step(0, Source())
    with pytest.raises(EngineError, match="engine 0 did not restart in 4 tries: the server did not answer"):
        scheduler.wait(10.0)


def test_an_engine_that_dies_again_and_again_ends_the_run(open_scheduler: Any) -> None:
    engine = FakeEngine(0)
    scheduler = open_scheduler([engine], StalenessManager(1, 0))
    scheduler.open_step(0, Source())
    with pytest.raises(EngineError, match="engine 0 failed 4 times in a row"):
        for _ in range(10):
            engine.is_dead = True
            assert not scheduler.wait(10.0)
            scheduler.hold([0])
            engine.is_dead = True
            scheduler.resume([0], 0)


@pytest.mark.parametrize("asked", [False, True])
def test_what_an_engine_refuses_although_it_is_well_is_said(open_scheduler: Any, asked: bool) -> None:
    engine = FakeEngine(0)
    engine.refuses = True
    scheduler = open_scheduler([engine], StalenessManager(1, 0))
    if asked:
        answers = scheduler.ask(Source()(3), scheduler.generate_groups, 2)
    else:
        scheduler.open_step(0, Source())
    with pytest.raises(EngineError, match="prompt 0 has no tokens"):
        scheduler.wait(10.0, answers if asked else None)
    assert engine.restarts == 0


def test_an_error_of_the_users_episode_is_said_at_once(open_scheduler: Any) -> None:
    async def episode(*_: Any) -> Sample:
        raise EpisodeError("the environment raised ZeroDivisionError")

    context = EpisodeContext(Spelling(), 8, 8)
    scheduler = open_scheduler(
        [FakeEngine(0)], StalenessManager(1, 0), episode_groups(Episodes(episode, context), PARAMS, 2, 5.0)
    )
    scheduler.open_step(0, Source())
    with pytest.raises(EpisodeError, match="ZeroDivisionError"):
        scheduler.wait(10.0)


def test_a_wait_that_runs_out_says_how_far_it_is(open_scheduler: Any) -> None:
    engines = [FakeEngine(0, lambda: 60.0)]
    scheduler = open_scheduler(engines, StalenessManager(3, 0), groups_per_engine=2)
    scheduler.open_step(0, Source())
    with pytest.raises(DeadlineError, match="0 groups are finished, 1 wait, engine 0 works on 2"):
        scheduler.wait(0.1)


def test_during_an_update_turns_wait_and_what_is_under_way_goes_on(open_scheduler: Any) -> None:
    async def two_turns(prompt: Prompt, number: int, sample: Any, context: Any) -> Sample:
        one = await sample(prompt.prompt_ids, 4)
        two = await sample([*prompt.prompt_ids, *one.response_ids], 2)
        ids, versions = one.response_ids + two.response_ids, one.weight_versions + two.weight_versions
        name = prompt.group_id
        return Sample(f"{name}/{number}", name, name, [0], ids, [1] * len(ids), [0.0] * len(ids), versions, "stop")

    engine = FakeEngine(0, lambda: 0.4)
    generate_groups = episode_groups(Episodes(two_turns, EpisodeContext(Spelling(), 8, 8)), PARAMS, 1, 20.0)
    scheduler = open_scheduler([engine], StalenessManager(1, 1), generate_groups)
    scheduler.open_step(0, Source())
    while not engine.now.total():
        time.sleep(0.001)
    scheduler.hold([0])
    assert engine.now.total(), "what is under way stays there"
    while engine.now.total():
        time.sleep(0.001)
    time.sleep(0.1)
    assert not engine.now.total(), "the first turns are done, and the second ones wait outside"
    give(scheduler, [engine], [0], 1)
    (group,) = finish(scheduler, [engine])
    assert group[0].weight_versions == [0, 0, 0, 0, 1, 1]


def test_what_is_passed_over_and_too_old_is_stopped_at_its_engine(open_scheduler: Any) -> None:
    seconds = iter([0.01, 5.0, 0.01, 0.01] + [0.01] * 100)
    times: dict[int, float] = {}

    def once() -> float:
        task = id(asyncio.current_task())
        return times.setdefault(task, next(seconds))

    engine = FakeEngine(0, once)
    scheduler = open_scheduler([engine], StalenessManager(3, 0, over_sample=1))
    scheduler.open_step(0, Source())
    assert [group[0].group_id for group in finish(scheduler, [engine])] == ["g0", "g2", "g3"]
    time.sleep(0.05)
    assert (engine.cancelled, scheduler.manager.aborted) == (1, 1)


def test_a_checkpoint_holds_the_responses_that_were_finished(open_scheduler: Any) -> None:
    source, engine = Source(), FakeEngine(7, lambda: 0.001)
    scheduler = open_scheduler([engine], StalenessManager(4, 2))
    scheduler.open_step(0, source)
    finish(scheduler, [engine])
    while scheduler.manager.count("finished") < 8 - 3:  # of the next two steps' groups
        time.sleep(0.001)
    scheduler.hold([0])
    state = json.loads(json.dumps(scheduler.state_dict()))
    finished = {group[0]["group_id"]: group for group in state["samples"]}
    assert len(finished) >= 5
    other = FakeEngine(9)
    again = open_scheduler([other], StalenessManager(4, 2))
    again.load_state_dict(state)
    taken = {}
    for version in (1, 2):
        again.open_step(version, source)
        again.resume([0], version)
        taken |= {group[0].group_id: group for group in finish(again, [other])}
    assert list(taken) == [f"g{i}" for i in range(4, 12)]
    for name, group in taken.items():
        if name in finished:
            assert [sample.to_dict() for sample in group] == finished[name]
        assert {token for sample in group for token in sample.response_ids} == {7 if name in finished else 9}
        assert not set(finished) & {key.partition("/")[0] for key in other.answered}


def test_a_checkpoint_holds_every_prompt_that_was_not_consumed(open_scheduler: Any) -> None:
    source, engines = Source(), [FakeEngine(0, lambda: 0.01)]
    scheduler = open_scheduler(engines, StalenessManager(4, 2), groups_per_engine=5)
    scheduler.open_step(0, source)
    seen = [group[0].group_id for group in finish(scheduler, engines)]
    state = scheduler.state_dict()
    again = open_scheduler([FakeEngine(0)], StalenessManager(4, 2))
    again.load_state_dict(state)
    for version in range(1, 4):
        again.open_step(version, source)
        again.resume([0], version)
        seen += [group[0].group_id for group in finish(again, engines)]
    assert seen == [f"g{i}" for i in range(16)]


@pytest.mark.parametrize(("staleness", "over_sample", "seed"), [(0, 0, 1), (1, 0, 2), (2, 0, 3), (1, 2, 4), (0, 3, 5)])
def test_a_run_with_failing_engines_consumes_every_prompt_once_and_never_too_old(
    open_scheduler: Any, staleness: int, over_sample: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.rollout.scheduling.restarts.FAILURES", 1000)  # these engines fail all the time
    luck = random.Random(seed)
    engines = [FakeEngine(number, lambda: luck.random() ** 3 / 30) for number in range(3)]
    manager = StalenessManager(6, staleness, over_sample)
    scheduler = open_scheduler(engines, manager, groups_per_engine=4, groups_per_request=1 + seed % 2)
    source, seen = Source(), list[int]()
    for version in range(25):
        if version:  # an update, in which an engine may fail
            update(scheduler, engines, serving(scheduler) + scheduler.without_weights, version, luck)
        scheduler.open_step(version, source)
        if luck.random() < 0.3:
            luck.choice(engines).is_dead = True
        for group in finish(scheduler, engines, version):
            seen.append(int(group[0].group_id[1:]))
            for sample in group:
                assert version - staleness <= sample.weight_versions[0] <= version
                assert sample.weight_versions == sorted(sample.weight_versions)
        time.sleep(luck.random() / 100)  # training
    check_prompts(scheduler, source, seen, 25 * 6)
    if not over_sample:
        assert seen == list(range(25 * 6))


def test_closing_stops_everything(open_scheduler: Any) -> None:
    engine = FakeEngine(0, lambda: 60.0)
    scheduler = open_scheduler([engine], StalenessManager(2, 0))
    scheduler.open_step(0, Source())
    scheduler.close()
    assert engine.cancelled == 2
    assert scheduler._loop.is_closed()  # its sockets are given back now, not whenever the object is collected
    scheduler.close()
