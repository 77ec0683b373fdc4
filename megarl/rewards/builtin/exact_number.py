"""`exact_number`: 1 if the last number of the response equals the gold number exactly, else 0.

Numbers are fractions, never floats: 0.1 is one tenth, 2.50 equals 5/2, and 1/3 does not equal 0.333. A division that can be
done, such as 144/2, is no number. Nor is 290/4, a fraction that can be reduced, unless the gold number is written as one.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from megarl.data.final_answer import extract_answer, without_thoughts
from megarl.data.sample import Sample
from megarl.rewards.scorer import Verdict, Verifier

# A sign belongs to a number unless it follows something that is subtracted from: in "5-3" the last number is 3.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.])[-+]\$?)?"
    r"(?P<value>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?![\w.]))?"
    r"(?:/(?P<divisor>\d+))?",
    re.ASCII,
)


class ExactNumber(Verifier):
    """The verifier over rows whose gold answer is a number, text that ends in `#### number`, or `<answer>number</answer>`."""

    name = "exact_number"

    def final_answer(self, response: str) -> str | None:
        """The last number as a fraction; None if there is none."""
        number = last_number(without_thoughts(response))
        return None if number is None else str(number)

    def judge(self, sample: Sample) -> Verdict:
        """1.0 or 0.0, or None where the gold answer is no number."""
        written = self.gold(sample)
        gold = gold_number(written)
        if gold is None:
            return None
        answer = without_thoughts(sample.response_text)
        return float(last_number(answer, lowest_terms="/" not in _gold_text(written)) == gold)


def last_number(text: str, *, lowest_terms: bool = False) -> Fraction | None:
    """The last number written in `text`: thousands commas, decimals, exponents and `a/b` count; None if there is none.

    Nor is there one if it is a division without remainder, which may be the question said again, or, with `lowest_terms`, a
    fraction that can be reduced.
    """
    matches = list(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))
    value = _value(matches[-1]) if matches else None
    if value is None or not (divisor := matches[-1]["divisor"]):
        return value
    return None if value.denominator == 1 or (lowest_terms and value.denominator != int(divisor)) else value


def gold_number(gold: Any) -> Fraction | None:
    """The number that `gold` is, or that follows its last `####`; None if that is not exactly one number."""
    match = _NUMBER.fullmatch(_gold_text(gold))
    return _value(match) if match else None


def _gold_text(gold: Any) -> str:
    return extract_answer(str(gold)).rpartition("####")[2].strip().replace("\N{MINUS SIGN}", "-").removeprefix("$")


def _value(match: re.Match[str]) -> Fraction | None:
    try:
        value = Fraction(match["value"].replace(",", "") + (match["exponent"] or ""))
        value /= int(match["divisor"] or 1)
    except (ValueError, ZeroDivisionError):  # more digits than Python converts, or a zero below the line
        return None
    return -value if (match["sign"] or "").startswith("-") else value
