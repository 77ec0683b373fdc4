"""Answers that a verifier of mathematics must not take for the gold one, and right ones in forms that it must take."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Sample
from megarl.rewards import RewardSources, build_rewards

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))


class Try(NamedTuple):
    """A wrong response, and why it might be paid."""

    name: str
    gold: str
    response: str
    why: str


LAST = "the gold formula was read by one of its numbers"
UNDONE = "the question said again: an operator that is still to be carried out"
DENIED = "the number is there, and what is said of it is false"
UNSEEN = "the number is there, and nobody sees it"
JOINED = "digits that stand apart are put together"
NEAR = "the difference is lost in rounding, or is no number"
CODE = "what reads the answer might run it"
MORE = "more than the gold answer, or less"
TRIES = [
    Try("the right side of a circle", "x^2+y^2=1", "\\boxed{1}", LAST),
    Try("the right side of a line", "3x+2y=6", "It is 6.", LAST),
    Try("the slope alone", "y=2x+1", "\\boxed{2}", LAST),
    Try("the intercept alone", "y = 2x + 1", "\\boxed{1}", LAST),
    Try("the last of a list", "3, 5", "\\boxed{5}", LAST),
    Try("the last of two with or", "3 or 5", "5", LAST),
    Try("the last root", "x = 2 or x = 3", "\\boxed{3}", LAST),
    Try("the last of two unknowns", "x=1, y=2", "\\boxed{y=2}", LAST),
    Try("the last of a pair", "(3, 5)", "5", LAST),
    Try("one end of an interval", "2<x<5", "2", LAST),
    Try("one side of a ratio", "3:4", "\\boxed{3}", LAST),
    Try("a multiple of pi without pi", "2pi", "\\boxed{2}", LAST),
    Try("a coefficient without its letters", "2xy", "\\boxed{2}", LAST),
    Try("a factor of a root", "2*sqrt(3)", "\\boxed{2}", LAST),
    Try("a factor of a difference", "6 - 2*sqrt(5)", "\\boxed{2}", LAST),
    Try("the real part alone", "3+4i", "\\boxed{3}", LAST),
    Try("the whole part of a mixed number", "1 1/2", "\\boxed{1}", LAST),
    Try("the exponent of a power of ten", "3e8", "\\boxed{8}", LAST),
    Try("the exponent of a small number", "1e-3", "\\boxed{-3}", LAST),
    Try("a list as one number", "2, 3, 5, 7", "\\boxed{2357}", JOINED),
    Try("a list as a decimal", "3,5", "3.5", JOINED),
    Try("a pair for a number", "35", "\\boxed{3,5}", JOINED),
    Try("digits with a space", "42", "\\boxed{4\\,2}", JOINED),
    Try("a derivative", "3x^2", "\\boxed{\\frac{d}{dx} x^3}", UNDONE),
    Try("an integral", "\\frac{\\pi}{4}", "\\boxed{\\int_0^1 \\frac{1}{1+x^2} dx}", UNDONE),
    Try("a sum without an end", "\\frac{\\pi^2}{6}", "\\boxed{\\sum_{n=1}^{\\infty} \\frac{1}{n^2}}", UNDONE),
    Try("a limit", "e", "\\boxed{\\lim_{n \\to \\infty} (1+\\frac{1}{n})^n}", UNDONE),
    Try("a product", "n!", "\\boxed{\\prod_{k=1}^{n} k}", UNDONE),
    Try("is not", "42", "\\boxed{x \\neq 42}", DENIED),
    Try("anything but", "42", "\\boxed{\\text{anything but } 42}", DENIED),
    Try("a relation that is false", "42", "\\boxed{41=42}", DENIED),
    Try("a bound", "42", "\\boxed{\\ge 42}", DENIED),
    Try("a phantom", "42", "\\boxed{\\phantom{42}}", UNSEEN),
    Try("white on white", "42", "\\boxed{\\color{white}{42} 41}", UNSEEN),
    Try("a comment of LaTeX", "42", "\\boxed{41 % 42}", UNSEEN),
    Try("crossed out", "42", "\\boxed{\\cancel{42} 41}", UNSEEN),
    Try("another base", "42", "\\boxed{42_7}", MORE),
    Try("written from right to left", "42", "\\boxed{\u202e24}", UNSEEN),
    Try("an expression that is undefined", "x+1", "\\boxed{x+1+\\frac{0}{0}}", NEAR),
    Try("a coefficient that is nearly one", "x+1", "\\boxed{1.00000001x+1}", NEAR),
    Try("zero for something very small", "\\pi \\times 10^{-9}", "\\boxed{0}", NEAR),
    Try("all numbers for a set of some", "\\{1,2,3\\}", "\\boxed{\\mathbb{N}}", MORE),
    Try("all numbers for an interval", "(-\\infty,3)", "\\boxed{\\mathbb{R}}", MORE),
    Try("a trivial equation", "y=2x+1", "\\boxed{0=0}", MORE),
    Try("a program between dollar signs", "x+1", "$__import__('os').write(3, b'\\0\\0\\0\\0\\0\\0\\xf0?')$", CODE),
    Try("a program as a formula", "2, 3", "().__class__.__base__.__subclasses__()", CODE),
]
RIGHT = [
    ("x^2+y^2=1", "\\boxed{y^2+x^2=1}"),
    ("y=2x+1", "y = 2x + 1"),
    ("3x+2y=6", "\\boxed{2y+3x=6}"),
    ("3, 5", "\\boxed{3, 5}"),
    ("3 or 5", "$3$ or $5$"),
    ("2, 3, 5, 7", "\\boxed{7,5,3,2}"),
    ("2, 3, 5, 7", "2, 3, 5, 7"),
    ("x = 2 or x = 3", "\\boxed{x=2 \\text{ or } x=3}"),
    ("x=1, y=2", "\\boxed{x=1, y=2}"),
    ("(3, 5)", "(3, 5)"),
    ("2<x<5", "\\boxed{2<x<5}"),
    ("3:4", "\\boxed{3:4}"),
    ("2pi", "\\boxed{2\\pi}"),
    ("2pi", "2pi"),
    ("2xy", "$2xy$"),
    ("2*sqrt(3)", "\\boxed{2\\sqrt{3}}"),
    ("6 - 2*sqrt(5)", "\\boxed{6-2\\sqrt5}"),
    ("3+4i", "\\boxed{3+4i}"),
    ("1 1/2", "\\boxed{1.5}"),
    ("3e8", "\\boxed{3 \\times 10^8}"),
    ("1e-3", "0.001"),
    ("sin(x)", "\\boxed{\\sin x}"),
    ("x**2", "$x^2$"),
    ("x = 5", "5"),
    ("x = -3", "\\boxed{x=-3}"),
    ("5*3=15", "\\boxed{15}"),
    ("5 m/s", "\\boxed{5\\text{ m/s}}"),
    ("12 apples", "12"),
    ("10 000", "\\boxed{10,000}"),
    ("1,234,567", "1234567"),
    ("$5", "5"),
]
"""Gold answers, and other ways to write these."""


@pytest.fixture(scope="module")
def math_verify() -> RewardSources:
    return build_rewards([RewardConfig(name="math_verify")], DATA)


def _sample(gold: str, response: str) -> Sample:
    return Sample("s", "g", "train-0", [1], [], [], [], [], "stop", response_text=response, row={"answer": gold})


@pytest.mark.parametrize("tried", TRIES, ids=[tried.name for tried in TRIES])
def test_a_wrong_answer_is_not_paid(math_verify: RewardSources, tried: Try) -> None:
    assert math_verify.score([_sample(tried.gold, tried.response)]) == [0.0], tried.why


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_a_right_answer_in_another_form_is_paid(math_verify: RewardSources, gold: str, response: str) -> None:
    assert math_verify.score([_sample(gold, response)]) == [1.0]
