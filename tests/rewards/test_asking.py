"""Verdicts on responses of finished groups: the same numbers, asked for once, and failures where the run decides about them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megarl.config.sections import RewardConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards.scorer import Outcome
from megarl.rewards.sources import RewardSources
from megarl.rewards.user_reward import UserReward

WAIT_S = 30.0


def sample(text: str) -> Sample:
    return Sample("s", "g", "train-0", [1], [], [], [], [], "stop", response_text=text)


class Source:
    """A source that notes what it is asked, is as slow as it is told, and fails on texts with an x."""

    keeps_errors, judges_apart = False, True

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Outcome]:
        assert until > time.monotonic()
        self.calls.append([sample.response_text for sample in samples])
        self.may_answer.wait(WAIT_S)
        return [self._of(sample.response_text) for sample in samples]

    def _of(self, text: str) -> Outcome:
        if "x" not in text:
            return float(len(text)) if text else None
        if self.keeps_errors:
            return RewardError(f"cannot read {text}")
        raise RewardError(f"cannot read {text}")

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do."""


def wait_for(there: Callable[[], Any]) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not there():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def kept(sources: RewardSources, label: str = "source") -> int:
    return len(sources._ahead[label]._verdicts)


def test_verdicts_that_are_there_are_taken_once() -> None:
    source = Source()
    sources = RewardSources([("source", 2.0, source)])
    groups = [[sample("a"), sample("bb")], [sample("")], [sample("dddd")]]
    for group in groups[:2]:
        sources.begin(group, by_branch=True)
    wait_for(lambda: kept(sources) == 3)
    samples = [one for group in groups for one in group]
    assert sources.score(samples) == [2.0, 4.0, 0.0, 8.0]
    assert [one.rewards["source"] for one in samples] == [1.0, 2.0, 0.0, 4.0]
    assert sources.failures == {samples[2].row_id: 1}
    assert sources.take_ahead() == 3
    assert sources.take_ahead() == 0
    assert source.calls[-1] == ["dddd"], "those that are left, in one call"
    assert sources.score(samples) == [2.0, 4.0, 0.0, 8.0]
    assert source.calls[-1] == ["a", "bb", "", "dddd"], "whoever asks again is answered anew"


def test_one_branch_of_an_episode_is_judged_unless_each_has_a_reward_of_its_own() -> None:
    source = Source()
    sources = RewardSources([("source", 1.0, source)])
    branches = [sample("a"), replace(sample("bb"), branch_of="s")]
    for by_branch, asked in ((False, [["a"]]), (True, [["a"], ["a", "bb"]])):
        sources.begin(branches, by_branch=by_branch)
        wait_for(lambda asked=asked: source.calls == asked)  # type: ignore[misc]


def test_an_equal_sample_is_another() -> None:
    source = Source()
    sources = RewardSources([("source", 1.0, source)])
    first, again = sample("a"), sample("a")
    sources.begin([first], by_branch=True)
    wait_for(lambda: kept(sources) == 1)
    sources.score([again])
    assert source.calls == [["a"], ["a"]]
    del first
    gc.collect()
    assert kept(sources) == 0, "nothing is left of a sample that nobody takes"


def test_what_comes_during_a_call_is_asked_together_and_a_step_waits_for_the_call() -> None:
    source = Source()
    source.may_answer.clear()
    sources = RewardSources([("source", 1.0, source)])
    samples = [sample(text) for text in ("a", "bb", "ccc", "dddd")]
    sources.begin(samples[:1], by_branch=True)
    wait_for(lambda: source.calls)
    for one in samples[1:]:
        sources.begin([one], by_branch=True)
    scores: list[float] = []
    step = threading.Thread(target=lambda: scores.extend(sources.score(samples[:3])))
    step.start()
    time.sleep(0.2)
    assert source.calls == [["a"]], "a source takes one call at a time"
    source.may_answer.set()
    step.join(WAIT_S)
    assert scores == [1.0, 2.0, 3.0]
    assert source.calls[1] == ["bb", "ccc"], "those of the step before those of the next"
    wait_for(lambda: kept(sources) == 1)
    assert source.calls[2:] == [["dddd"]]
    assert sources.score(samples[3:]) == [4.0]
    assert sources.take_ahead() == 2


def test_a_failure_is_the_steps() -> None:
    source = Source()
    sources = RewardSources([("source", 1.0, source)])
    good, bad = sample("aa"), sample("ax")
    sources.begin([good, bad], by_branch=True)
    wait_for(lambda: kept(sources) == 1)
    with pytest.raises(RewardError, match="cannot read ax"):
        sources.score([good, bad])
    assert source.calls == [["aa", "ax"], ["ax"]]

    sources.tolerate([RewardConfig(name="source", on_error="zero", strict_steps=0, max_error_share=0.5)])
    assert sources.tolerance is not None
    sources.tolerance.begin_step(3)
    sources.begin([good, bad], by_branch=True)
    wait_for(lambda: kept(sources) == 1)
    assert sources.score([good, bad]) == [2.0, 0.0]
    assert sources.tolerance.step_figures()["reward/errors"] == 1


def test_a_call_that_hangs_ends_the_step_at_its_deadline() -> None:
    source = Source()
    source.may_answer.clear()
    sources = RewardSources([("source", 1.0, source)])
    sources.begin([sample("a")], by_branch=True)
    wait_for(lambda: source.calls)
    with pytest.raises(RewardError, match=r"reward 'source' did not score 1 samples before the deadline .* earlier ones"):
        sources.score([sample("b")], deadline_s=0.2)
    source.may_answer.set()
    assert sources.score([sample("b")]) == [1.0]


def one(sample: Sample) -> float:
    """A function that judges one response."""
    return len(sample.response_text)


def several(samples: list[Sample]) -> list[float]:
    """A function that compares responses."""
    longest = max(len(sample.response_text) for sample in samples)
    return [float(len(sample.response_text) == longest) for sample in samples]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A function of verl's form."""
    return 1.0


@pytest.mark.parametrize(("function", "apart"), [("one", True), ("several", False), ("compute_score", True)])
def test_functions_that_get_one_sample_are_asked_ahead(function: str, apart: bool) -> None:
    assert UserReward(f"{__file__}:{function}", {}).judges_apart is apart


def test_a_function_that_compares_gets_all_at_once() -> None:
    sources = RewardSources([("own", 1.0, UserReward(f"{__file__}:several", {}))])
    sources.begin([sample("a")], by_branch=True)
    assert sources.score([sample("a"), sample("bb")]) == [0.0, 1.0]
    assert sources.take_ahead() == 0
