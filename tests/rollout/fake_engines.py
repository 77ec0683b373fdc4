"""Engines of a test's own under the real scheduler, and what tests do with them: updates, batches, and the count of prompts."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megarl.core.staleness_manager import StalenessManager
from megarl.data.sample import Prompt, Sample
from megarl.errors import EngineError, WorkerError
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.scheduling.requests import single_turns
from megarl.rollout.scheduling.scheduler import Scheduler


def serving(scheduler: Scheduler) -> list[int]:
    """Engines that have weights."""
    return [engine.number for engine in scheduler.engines if engine.version is not None]


class Spelling:
    """A tokenizer that any ids are words to."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


class FakeEngine:
    """Answers after `seconds()`; may be dead, refuse requests, or fail to start."""

    def __init__(self, number: int, seconds: Callable[[], float] = lambda: 0.001) -> None:
        self.number, self.seconds = number, seconds
        self.version: int | None = 0
        self.is_dead = self.refuses = False
        self.starts_that_fail = 0
        self.restarts = self.cancelled = self.most = 0
        self.now: Counter[str] = Counter()
        self.answered: list[str] = []

    async def health(self, *, deadline_s: float) -> None:
        if self.is_dead:
            raise EngineError("the server ended with exit code -9")

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        assert request.begun is None, "it does not continue"
        length, keys = request.params.max_new_tokens, request.keys or ()
        self._check()
        if self.refuses:
            raise EngineError("prompt 0 has no tokens")
        self.now.update(keys)
        self.most = max(self.most, sum(self.now.values()))
        versions: list[int] = []
        try:
            for _ in range(length):
                await asyncio.sleep(self.seconds() / length)
                while self.version is None:  # it does not sample during an update
                    await asyncio.sleep(0.0005)
                self._check()
                versions.append(self.version)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now.subtract(keys)
        self.answered += keys
        answer = Generation([self.number] * length, [0.0] * length, versions, "length")
        return [[answer] * request.n for _ in request.prompts]

    def _check(self) -> None:
        if self.is_dead:
            raise WorkerError("the process is gone")

    async def restart(self, deadline_s: float) -> None:
        await asyncio.sleep(0.005)
        if self.starts_that_fail:
            self.starts_that_fail -= 1
            raise EngineError("the server did not answer")
        self.is_dead, self.version = False, None
        self.restarts += 1


class Source:
    """Prompts without end."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, count: int) -> list[Prompt]:
        self.given += count
        return [Prompt(f"r{i}", f"g{i}", [i], str(i)) for i in range(self.given - count, self.given)]


@contextmanager
def schedulers(params: SamplingParams, **always: Any) -> Iterator[Callable[..., Scheduler]]:
    """A function that opens schedulers of single turns, two samples to a prompt; they are closed at the end."""
    opened: list[Scheduler] = []

    def make(
        engines: Sequence[FakeEngine], manager: StalenessManager, generate_groups: Any = None, **options: Any
    ) -> Scheduler:
        generate_groups = generate_groups or single_turns(params, 2, 30.0, Spelling())
        opened.append(Scheduler(engines, manager, generate_groups, **always, **options))
        opened[-1].resume(range(len(engines)), 0)
        return opened[-1]

    yield make
    for scheduler in opened:
        scheduler.close()


def finish(scheduler: Scheduler, engines: Sequence[FakeEngine], version: int = 0) -> list[list[Sample]]:
    """Take the batch that is due; engines that come back are given `version`."""
    while not scheduler.wait(10.0):
        give(scheduler, engines, scheduler.without_weights, version)
    return scheduler.pop_batch().samples


def give(scheduler: Scheduler, engines: Sequence[FakeEngine], numbers: Sequence[int], version: int) -> None:
    scheduler.hold(numbers)
    for number in numbers:
        engines[number].version = version
    scheduler.resume(numbers, version)


def update(
    scheduler: Scheduler, engines: Sequence[FakeEngine], numbers: Sequence[int], version: int, luck: random.Random
) -> None:
    """One engine after the other gets new weights, except every tenth, which is killed meanwhile."""
    scheduler.hold(numbers)
    for number in numbers:
        engines[number].version = None
        time.sleep(luck.random() / 500)
        if luck.random() < 0.1:
            scheduler.fail(number, EngineError("it was killed in the middle of an update"))
        else:
            give(scheduler, engines, [number], version)


def check_prompts(scheduler: Scheduler, source: Source, seen: Sequence[int], consumed: int) -> None:
    """So many groups were consumed, and each prompt that was given once: by now, or it is in the scheduler's state."""
    assert len(seen) == len(set(seen)) == consumed
    left = [int(prompt["group_id"][1:]) for prompt in scheduler.state_dict()["prompts"]]
    assert sorted([*seen, *left]) == list(range(source.given))
