"""avg@k, pass@j and maj@k are what enumeration of all draws says; standard errors are those of prompts."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from megarl.data.final_answer import last_boxed
from megarl.data.sample import Sample
from megarl.experience.eval_figures import accuracy_figures, majority, pass_at, set_figures
from megarl.observe import evaluation_line
from megarl.rewards.builtin.exact_number import ExactNumber
from megarl.rewards.builtin.format_regex import FormatRegex
from megarl.rewards.builtin.math_verify import MathVerify
from megarl.rewards.builtin.multiple_choice import MultipleChoice
from megarl.rewards.sources import RewardSources


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_pass_at_j_is_the_share_of_draws_with_a_right_response(k: int) -> None:
    for right in range(k + 1):
        group = [True] * right + [False] * (k - right)
        for j in range(1, k + 1):
            draws = list(itertools.combinations(group, j))
            assert pass_at(j, right, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_figures_are_means_over_prompts_with_their_standard_errors() -> None:
    chance = random.Random(0)
    groups = [[chance.random() < share for _ in range(8)] for share in (0.0, 0.1, 0.5, 0.9, 1.0, 0.4)]
    answers = [["7" if right else chance.choice(["1", "2"]) for right in group] for group in groups]
    figures = accuracy_figures(groups, answers)
    names = ["avg@8", "pass@2", "pass@4", "pass@8", "maj@8"]
    assert list(figures) == [name for both in names for name in (both, f"{both}_se")]
    averages = [sum(group) / 8 for group in groups]
    assert figures["avg@8"] == pytest.approx(statistics.mean(averages))
    assert figures["avg@8_se"] == pytest.approx(statistics.stdev(averages) / math.sqrt(6))
    passes = [float(any(group)) for group in groups]
    assert (figures["pass@8"], figures["pass@8_se"]) == pytest.approx(
        (statistics.mean(passes), statistics.stdev(passes) / math.sqrt(6))
    )
    assert figures["pass@2"] == pytest.approx(statistics.mean(pass_at(2, sum(group), 8) for group in groups))


def test_one_response_has_an_average_alone_and_one_prompt_no_error() -> None:
    assert accuracy_figures([[True], [False]], [["1"], ["2"]]) == {"avg@1": 0.5, "avg@1_se": 0.5}
    assert accuracy_figures([[True, False]], [["1", "2"]]) == {"avg@2": 0.5, "pass@2": 1.0, "maj@2": 0.5}


@pytest.mark.parametrize(
    ("right", "answers", "value"),
    [
        ([True, True, False], ["1/2", "0.5", "3"], 1.0),  # right ones agree however they are written
        ([True, False, False], ["4", "3", "3"], 0.0),
        ([True, False, True, False], ["4", "3", "4", "3"], 0.5),  # a tie
        ([True, False, False], ["4", "3", "2"], 1 / 3),
        ([True, False, False], ["4", None, None], 1.0),  # who answers nothing does not vote
        ([False, False], [None, None], 0.0),
        ([True, True], [None, None], 1.0),
    ],
)
def test_the_most_frequent_answer_counts(right: list[bool], answers: list[str | None], value: float) -> None:
    assert majority(right, answers) == pytest.approx(value)


def sample(text: str, right: bool, *, source: str = "", truncated: bool = False) -> Sample:
    finish = "length" if truncated else "stop"
    made = Sample("s", "g", "row", [1], [2, 3], [1, 1], [0.0, 0.0], [0, 0], finish, "", text, row={"data_source": source})
    made.rewards["exact_number"] = float(right)
    return made


def test_sets_have_figures_of_each_data_source_too() -> None:
    samples = [
        sample("it is 4", True, source="gsm8k"),
        sample("4", True, source="gsm8k", truncated=True),
        sample("1", False, source="aime"),
        sample("2", True, source="aime"),
    ]
    rewards = RewardSources([("exact_number", 1.0, ExactNumber("answer"))])
    figures = set_figures(
        samples, [1.0, 1.0, 0.0, 1.0], samples_per_prompt=2, source_key="data_source", final_answer=rewards.final_answer
    )
    assert (figures["avg@2"], figures["gsm8k/avg@2"], figures["aime/avg@2"]) == (0.75, 1.0, 0.5)
    assert (figures["aime/pass@2"], figures["aime/maj@2"]) == (1.0, 0.5)
    assert (figures["reward"], figures["tokens_mean"], figures["truncated"], figures["prompts"]) == (0.75, 2.0, 0.25, 2.0)


@pytest.mark.parametrize(
    ("scorer", "response", "answer"),
    [
        (ExactNumber("answer"), "first 3, then 1,000.50", "2001/2"),
        (ExactNumber("answer"), "none", None),
        (MultipleChoice("answer"), "the answer is (B)", "B"),
        (MathVerify("answer"), r"so \boxed{ \frac{1}{2} } it is", r"\frac{1}{2}"),
        (MathVerify("answer"), "so it is 12", "12"),
        (MathVerify("answer"), "<answer>x + y</answer>", "x + y"),
        (MathVerify("answer"), "no idea", None),
        (FormatRegex("answer", pattern="x"), "<answer> 7 </answer>", "7"),
    ],
)
def test_sources_read_the_final_answer(scorer: object, response: str, answer: str | None) -> None:
    assert RewardSources([("one", 1.0, scorer)]).final_answer(response) == answer  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{ \boxed{3}", "3"),
        (r"}}{{", None),
        ("", None),
        (r"\boxed{" * 20000 + "}" * 20000, ""),
    ],
)
def test_the_last_box_that_closes(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


def test_an_evaluation_is_one_line() -> None:
    figures = {"reward": 0.5, "accuracy": 0.25, "prompts": 8.0, "sums/avg@2": 0.5, "sums/avg@2_se": 0.0123, "sums/prompts": 4.0}
    assert evaluation_line(figures | {"seconds": 3.0}) == (
        "reward 0.5, accuracy 0.25 (8 prompts); sums: avg@2 0.5 ± 0.012 (4 prompts)"
    )
