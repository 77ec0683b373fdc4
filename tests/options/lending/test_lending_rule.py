"""When GPUs are lent, and what is told of it: by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megarl.options.lending.turns import Lending, LendingRule
from megarl.workers.gpu_sharing import GpuSharing
from tests.workers.test_gpu_sharing import Memory


class Times:
    """Two lent engines, numbers 3 and 4, whose every move takes its time."""

    numbers = (3, 4)

    def __init__(self) -> None:
        self.now, self.wake_s, self.rest_s, self.work, self.sampled_tokens = 100.0, 4.0, 2.0, 5, 0
        self.given: list[tuple[Sequence[int], int]] = []
        self.memory = Memory()
        self.sharing = GpuSharing(self.memory.sleep, self.memory.wake, self.memory.wake_caches, self.memory.keep)
        self.lending = Lending(self, self.sharing, self.update, lambda: self.now)  # type: ignore[arg-type]
        train = self.sharing.train

        def timed_train() -> None:
            self.now += self.rest_s if self.memory.engine != "none" else 0.0
            train()

        self.sharing.train = timed_train  # type: ignore[method-assign]
        self.memory.sleep()
        self.sharing.now = type(self.sharing.now).TRAINING  # type: ignore[union-attr]

    def work_for(self, version: int, answers: Any = None) -> int:
        return self.work

    def update(self, engines: Sequence[int], version: int) -> None:
        self.given.append((engines, version))
        self.sharing.update()
        self.now += self.wake_s
        self.sharing.generate()

    def step(self, version: int, wait_s: float, tokens: int = 0) -> dict[str, float]:
        """A wait of `wait_s` seconds, and what is told of it."""
        begun = self.now
        self.lending.wait(version)
        self.now = max(self.now, begun + wait_s)
        self.sampled_tokens += tokens
        self.lending.take_back()
        assert self.memory.engine == "none"
        self.now += 50.0  # training
        self.lending.take_back()
        return self.lending.take_figures()


def test_what_is_told_of_a_step_is_what_was_lent_in_it() -> None:
    times = Times()
    assert times.step(7, 20.0, tokens=11) == {
        "rollout/lent_tokens": 11,
        "rollout/lent_s": 16.0,
        "rollout/lending_s": 6.0,
        "rollout/lent_share": 16.0 / 20.0,
    }
    assert times.given == [((3, 4), 7)]
    times.work = 0
    assert times.step(8, 20.0) == dict.fromkeys(
        ("rollout/lent_tokens", "rollout/lent_s", "rollout/lending_s", "rollout/lent_share"), 0.0
    )
    assert times.given == [((3, 4), 7)], "there was nothing for them to do"


def test_gpus_that_are_lent_already_stay_so_until_the_trainer_works() -> None:
    times = Times()
    times.lending.wait(1)
    times.now += 10.0
    times.lending.wait(1)  # for groups in place of uniform ones
    times.now += 10.0
    times.lending.take_back()
    assert times.given == [((3, 4), 1)]
    assert times.lending.take_figures()["rollout/lent_share"] == pytest.approx(20 / 24)


def test_gpus_are_lent_where_the_last_wait_was_longer_than_lending_takes() -> None:
    times = Times()
    for version in range(2):  # tried in any case
        times.step(version, 5.0)
    assert len(times.given) == 2
    times.step(2, 7.0)  # lending takes 6 s, and the last wait was 5 s
    assert len(times.given) == 2
    times.step(3, 3.0)
    assert len(times.given) == 3
    times.step(4, 9.0)
    assert len(times.given) == 3


def test_the_cheapest_of_two_times_counts() -> None:
    rule = LendingRule()
    rule.costs_s = [100.0]
    assert rule.pays(), "the first time takes longer than others"
    rule.costs_s.append(5.0)
    rule.idle_s = 5.0
    assert not rule.pays()
    rule.idle_s = 5.1
    assert rule.pays()
