"""Groups that are cut and go on, by the scheduler on engines of its test's own: no token is lost, counted twice or too old."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from megarl.core.staleness_manager import StalenessManager
from megarl.data.prefills import PrefillCounts
from megarl.data.sample import Prompt, Sample
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.episodes import EpisodeContext, Episodes
from megarl.rollout.scheduling.episode_requests import episode_groups
from megarl.rollout.scheduling.partial_groups import PartialGroup, PartialGroups, turn_name
from megarl.rollout.scheduling.requests import single_turns
from megarl.rollout.scheduling.scheduler import Scheduler
from tests.rollout.fake_engines import FakeEngine, Source, Spelling, check_prompts, finish, give, schedulers, serving, update

LENGTH = 6
PARAMS = SamplingParams(max_new_tokens=LENGTH)
PATIENCE_S = 300.0
"""For an answer: no test here is about an engine that hangs, and a busy machine may stop all for a while."""


@dataclass
class Book:
    """What all engines of a test sampled: a token is sampled once, so that whoever has it has it from there."""

    version_of: dict[int, int] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    """Tokens that an engine gave away, and not died with."""
    behind: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """All tokens before it, prompt included."""


class ContinuingEngine(FakeEngine):
    """Cuts and continues. Token ids count up over all engines; a token's log-prob is minus its id."""

    def __init__(self, number: int, book: Book, seconds: Callable[[], float]) -> None:
        super().__init__(number, seconds)
        self.book, self.cut_keys = book, set[str]()
        self.ended: list[str] = []

    async def cut(self, keys: Sequence[str], *, deadline_s: float) -> None:
        self._check()
        self.cut_keys |= {*keys}

    async def end_conversations(self, names: Sequence[str], *, deadline_s: float) -> None:
        self._check()
        self.ended += names

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        keys, begun = request.keys or (), request.begun
        self.cut_keys -= {*keys}
        self.now.update(keys)
        rows = [
            [self._row(prompt, number, request.params, begun[place][number] if begun else None) for number in range(request.n)]
            for place, prompt in enumerate(request.prompts)
        ]
        try:
            while any(row.finish_reason is None for group in rows for row in group):
                await asyncio.sleep(self.seconds() / LENGTH)
                while self.version is None:
                    await asyncio.sleep(0.0005)
                self._check()
                for group, key in zip(rows, keys, strict=True):
                    for row in group:
                        row.step(key in self.cut_keys, self.version, self.book)
        finally:
            self.now.subtract(keys)
        answers = [[row.generation() for row in group] for group in rows]
        self.book.told |= {token for group in answers for one in group for token in one.response_ids}
        self.answered += keys
        return answers

    def _row(self, prompt: Sequence[int], number: int, params: SamplingParams, begun: Generation | None) -> Row:
        had = begun or Generation([], [], [], "abort")
        row = Row(list(prompt), 1 + (sum(prompt) + 3 * number) % params.max_new_tokens, list(had.response_ids))
        row.versions = list(had.weight_versions)
        row.finish_reason = had.finish_reason if had.finish_reason != "abort" else None
        return row


NUMBERS = count(1)


@dataclass
class Row:
    """One response of such an engine; it ends after `length` tokens, which follows from its prompt and number."""

    prompt: list[int]
    length: int
    ids: list[int]
    versions: list[int] = field(default_factory=list)
    finish_reason: Any = None

    def step(self, is_cut: bool, version: int, book: Book) -> None:
        if self.finish_reason is not None:
            return
        if is_cut:
            self.finish_reason = "abort"
            return
        token = next(NUMBERS)
        book.version_of[token], book.behind[token] = version, (*self.prompt, *self.ids)
        self.ids.append(token)
        self.versions.append(version)
        if len(self.ids) == self.length:
            self.finish_reason = "stop"

    def generation(self) -> Generation:
        return Generation(self.ids, [-float(token) for token in self.ids], self.versions, self.finish_reason)


@pytest.fixture
def open_scheduler() -> Iterator[Callable[..., Scheduler]]:
    with schedulers(PARAMS, cuts=True) as make:
        yield make


def asking(*, episodes: bool) -> Any:
    """How a run asks for groups of two samples: single turns, or episodes of three."""
    kind = Episodes(three_turns, EpisodeContext(Spelling(), 8, 30))
    return episode_groups(kind, PARAMS, 2, PATIENCE_S) if episodes else single_turns(PARAMS, 2, PATIENCE_S, Spelling())


async def three_turns(prompt: Prompt, number: int, sample: Any, context: Any) -> Sample:
    """An episode that is told its own number of tokens so far, three times."""
    ids, mask, log_probs, versions = list[int](), list[int](), list[float](), list[int]()
    for turn in range(3):
        answer = await sample([*prompt.prompt_ids, *ids], LENGTH)
        ids += [*answer.response_ids, -len(ids)][: None if turn < 2 else -1]
        mask += [*[1] * len(answer.response_ids), 0][: None if turn < 2 else -1]
        log_probs += [*answer.log_probs, 0.0][: None if turn < 2 else -1]
        versions += [*answer.weight_versions, answer.weight_versions[-1]][: None if turn < 2 else -1]
    name = prompt.group_id
    return Sample(f"{name}/{number}", name, name, prompt.prompt_ids, ids, mask, log_probs, versions, "stop")


def check_sample(sample: Sample, book: Book) -> None:
    """Every sampled token is where it was sampled, with the log-prob and version that it had then."""
    assert sample.response_ids
    for place, token in enumerate(sample.response_ids):
        if sample.sampled_mask[place]:
            assert sample.weight_versions[place] == book.version_of[token]
            assert sample.rollout_log_probs[place] == -token
            assert book.behind[token] == (*sample.prompt_ids, *sample.response_ids[:place])


@pytest.mark.parametrize("episodes", [False, True], ids=["single turns", "episodes"])
@pytest.mark.parametrize("continues", [False, True], ids=["restart", "continue"])
@pytest.mark.parametrize(("staleness", "over_sample", "seed"), [(0, 4, 1), (0, 2, 2), (1, 3, 3), (0, 0, 4)])
def test_every_token_that_was_sampled_is_trained_once_waits_or_is_counted_as_thrown_away(
    open_scheduler: Any, staleness: int, over_sample: int, seed: int, continues: bool, episodes: bool, monkeypatch: Any
) -> None:
    """With engines that die, checkpoints and resumes in between, in which the driver loses everything else."""
    monkeypatch.setattr("megarl.rollout.scheduling.restarts.FAILURES", 1000)
    luck, book = random.Random(seed), Book()
    engines = [ContinuingEngine(number, book, lambda: luck.random() ** 3 / 20) for number in range(3)]
    ask = asking(episodes=episodes)

    def opened() -> Scheduler:
        manager = StalenessManager(6, staleness, over_sample, continues=continues)
        return open_scheduler(engines, manager, ask, groups_per_engine=4, groups_per_request=1 + seed % 2, keeps_turns=True)

    scheduler, source, seen = opened(), Source(), list[int]()
    trained, aborted, older = set[int](), 0, 0
    for version in range(16):
        if version:
            update(scheduler, engines, serving(scheduler) + scheduler.without_weights, version, luck)
        scheduler.open_step(version, source)
        if luck.random() < 0.3:
            luck.choice(engines).is_dead = True
        for group in finish(scheduler, engines, version):
            seen.append(int(group[0].group_id[1:]))
            for sample in group:
                check_sample(sample, book)
                tokens = [t for t, own in zip(sample.response_ids, sample.sampled_mask, strict=True) if own]
                assert not trained & {*tokens}
                trained |= {*tokens}
                assert version - staleness - continues <= sample.weight_versions[0]
                assert sample.weight_versions == sorted(sample.weight_versions)
                older += sum(book.version_of[token] < version - staleness for token in tokens)
        if not staleness:
            assert not any(engine.now.total() for engine in engines if not engine.is_dead), (
                "engines rest while the trainer works"
            )
            waiting = [turn for group in scheduler.partial._groups.values() for turn in group._turns.values()]
            waiting_tokens = {token for turn in waiting for token in turn.response_ids}
            thrown = book.told - trained - waiting_tokens
            assert len(thrown) == aborted + scheduler.partial.aborted_tokens
        if version % 5 == 4:
            state = json.loads(json.dumps(scheduler.state_dict()))
            aborted += scheduler.partial.aborted_tokens
            scheduler.close()
            scheduler = opened()
            for engine in engines:
                engine.is_dead = False
            scheduler.load_state_dict(state)
            assert staleness or scheduler.state_dict() == state  # else what was in flight begins anew
    check_prompts(scheduler, source, seen, 16 * 6)
    if over_sample and not staleness:
        assert (older > 0) is continues
        assert (aborted + scheduler.partial.aborted_tokens > 0) or continues


def test_what_is_cut_waits_and_goes_on_with_what_it_has(open_scheduler: Any) -> None:
    """One slow group of four: its samples have a beginning under version 0 and the rest under version 1."""
    book, times = Book(), dict[int, float]()
    seconds = iter([0.02, 20.0, 0.02, 0.02])

    def slow_second() -> float:
        return times.setdefault(id(asyncio.current_task()), next(seconds, 0.02))

    engine = ContinuingEngine(0, book, slow_second)
    prompts = [Prompt(f"r{i}", f"g{i}", [6, 5 + i], "") for i in range(20)]  # of which g1 has the longest responses
    source = iter(prompts)
    scheduler = open_scheduler([engine], StalenessManager(3, 0, 1, continues=True))
    scheduler.open_step(0, lambda count: [next(source) for _ in range(count)])
    while not (partial := [row for row, version in book.version_of.items() if book.behind[row][:2] == (6, 6)]):
        time.sleep(0.001)
        if engine.now["g1"] and not engine.now["g0"]:
            times.clear()  # let it have a token or two
    assert [group[0].group_id for group in finish(scheduler, [engine])] == ["g0", "g2", "g3"]
    assert (scheduler.manager.suspended, scheduler.manager.aborted, scheduler.partial.aborted_tokens) == (1, 0, 0)
    kept = scheduler.state_dict()["partial"]["1"]
    had = {turn["response_ids"][0] for turn in kept.values()}
    assert set(partial) & had
    give(scheduler, [engine], [0], 1)
    scheduler.open_step(1, lambda count: [next(source) for _ in range(count)])
    batch = finish(scheduler, [engine], 1)
    [group] = [group for group in batch if group[0].group_id == "g1"]
    assert {sample.response_ids[0] for sample in group} == had
    assert scheduler.partial.aborted_tokens == 0


def test_an_episode_that_is_told_something_else_when_it_goes_on_begins_its_turn_anew(open_scheduler: Any) -> None:
    book, tries = Book(), count()

    async def moody(prompt: Prompt, number: int, sample: Any, context: Any) -> Sample:
        first = await sample(list(prompt.prompt_ids), LENGTH)
        said = -1000 - next(tries)
        second = await sample([*prompt.prompt_ids, *first.response_ids, said], LENGTH)
        ids = [*first.response_ids, said, *second.response_ids]
        mask = [*[1] * len(first.response_ids), 0, *[1] * len(second.response_ids)]
        versions = [*first.weight_versions, 0, *second.weight_versions]
        log_probs = [*first.log_probs, 0.0, *second.log_probs]
        return Sample("g0/0", "g0", "r0", prompt.prompt_ids, ids, mask, log_probs, versions, "stop")

    engine = ContinuingEngine(0, book, lambda: 0.05)
    ask = episode_groups(Episodes(moody, EpisodeContext(Spelling(), 8, 30)), PARAMS, 1, PATIENCE_S)
    scheduler = open_scheduler([engine], StalenessManager(1, 0, continues=True), ask, keeps_turns=True)
    scheduler.open_step(0, lambda count: [Prompt("r0", "g0", [5], "5")] * count)
    while not any(-1000 in before for before in book.behind.values()):
        time.sleep(0.001)
    scheduler.stop_all()
    [[sample]] = finish(scheduler, [engine])
    check_sample(sample, book)
    assert -1001 in sample.response_ids
    assert scheduler.partial.aborted_tokens == sum(
        -1000 in before for token, before in book.behind.items() if token in book.told
    )
    assert len(book.told) == scheduler.partial.aborted_tokens + sum(sample.sampled_mask)
    assert list(book.behind.values()).count((5,)) == 1, "the first turn was not sampled twice"
    assert set(engine.ended) == {"g0/0"}


def test_groups_that_are_finished_or_have_no_tokens_are_not_written() -> None:
    groups = PartialGroups(continues=True)
    for number in range(2):
        groups.of(number).keep(turn_name(0, [1]), Generation([6], [-1.0], [4], "abort"))
    groups.of(2)
    assert list(groups.state_dict(finished={0})) == ["1"]
    assert PartialGroups(continues=True).load_state_dict(groups.state_dict(finished={0})) == [1]
    assert PartialGroups(continues=False).load_state_dict(groups.state_dict(finished={0})) == []


def test_what_there_is_of_a_group_survives_a_file() -> None:
    group = PartialGroup()
    whole = Generation([4, 5], [-0.5, -0.25], [3, 4], "stop", prefill=PrefillCounts(7, 3))
    cut = Generation([6], [-1.0], [4], "abort")
    group.keep(turn_name(0, [1, 2]), whole)
    group.keep(turn_name(1, [1, 2]), cut)
    group.keep(turn_name(2, [1, 2]), Generation([], [], [], "abort"))
    read = PartialGroup.of_dict(json.loads(json.dumps(group.to_dict())))
    found = read.turn(turn_name(0, [1, 2]))
    assert found is not None
    assert (found.prefill, found.weight_versions) == (whole.prefill, [3, 4])
    assert read.turn(turn_name(1, [1, 2])) == Generation([6], [-1.0], [4], "abort")
    assert read.turn(turn_name(2, [1, 2])) is None
    assert (read.tokens, read.empty(), read.tokens) == (3, 3, 0)
    assert turn_name(0, [1, 2]) != turn_name(0, [12]) != turn_name(0, [12], 1)
