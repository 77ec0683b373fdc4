"""The verifiers that judge in a process of their own. Imported by path from `judge_child.py`: nothing of megarl.

A judge comes in two halves: from the row (trusted, prepared once and kept) to a function of the answer (run in a fork).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Judge = Callable[[str], float | None]
"""From an answer to a number from 0 to 1, or None where it cannot be judged."""


def reasoning_gym_judge() -> Callable[[str, dict[str, Any], dict[str, Any]], Judge]:
    """(task, its arguments, row) → the task's score, or None where the task raises on the answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib's, where no compiled file of it can be kept
        from reasoning_gym import create_dataset

    tasks: dict[str, Any] = {}

    def about(task: str, arguments: dict[str, Any], row: dict[str, Any]) -> Judge:
        key = repr((task, arguments))
        if key not in tasks:
            tasks[key] = create_dataset(task, **arguments, seed=0, size=1)
            with contextlib.suppress(Exception):  # loads what the task loads when it first judges, once for all forks
                tasks[key].score_answer(str(row["answer"]), row)
        return lambda answer: float(tasks[key].score_answer(answer, row))

    return about


def math_verify_judge() -> Callable[..., Judge]:
    """(gold, whether expressions will do) → whether the response's final answer equals the gold one, None if that is no
    mathematics. Where the gold one is written as a number, the answer must be: the question said again is no answer."""
    from math_verify import parse, verify

    def about(gold: str, allow_expressions: bool = False) -> Judge:  # noqa: FBT001 - a row's part of a question is a tuple
        parsed_gold = parse_gold(gold)
        number = None if allow_expressions or not parsed_gold else written_number(parsed_gold[-1])
        lowest_terms = number is not None and not _FRACTION.search(str(parsed_gold[-1]))

        def judge(response: str) -> float | None:
            if not parsed_gold:
                return None
            try:
                # No timeouts: they are alarm signals, which wait for the end of an operation in C.
                whole = as_formula(response.strip()) if number is None else None
                answer = parse(whole or response, parsing_timeout=None)
                if number is not None and (not answer or not says_number(answer[-1], number, lowest_terms=lowest_terms)):
                    return 0.0
                if not allow_expressions and _undone(answer) - _undone(parsed_gold):
                    return 0.0
                return float(verify(parsed_gold, answer, timeout_seconds=None))
            except (MemoryError, RecursionError):
                return 0.0

        return judge

    # math-verify turns its own errors into False; the second loads its reader of LaTeX, once for all forks
    if about("1")("1") != 1 or about("1")("$\\frac{4}{2}$") != 0:
        sys.exit("math-verify does not work here")
    return about


def _undone(expressions: Sequence[Any]) -> set[type]:
    """Kinds of operators in these that are still to be carried out; sympy would do it for who was asked to."""
    from sympy import Basic, Derivative, Integral, Limit, Product, Sum

    kinds = (Derivative, Integral, Limit, Product, Sum)
    return {kind for kind in kinds for one in expressions if isinstance(one, Basic) and one.has(kind)}


def parse_gold(gold: str) -> list[Any]:
    """The expressions in `gold`, empty if it has none. LaTeX or a formula need not stand between dollar signs."""
    from math_verify import parse

    bare = gold.strip()
    formula = as_formula(bare)
    is_latex = "\\" in bare and "$" not in bare and "\\boxed" not in bare
    tries = [f"${bare}$"] if is_latex else [formula, bare] if formula is not None else [bare]
    for text in tries:
        expressions = parse(text, parsing_timeout=None)
        # math-verify adds the matched text as a string; alone, it means that the text is no mathematics
        if any(not isinstance(expression, str) for expression in expressions):
            return expressions
    return []


_LATEX_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])")
_NAMES = re.compile(r"(?:\b|(?<=\d))(?:and|or|sqrt|pi|sin|cos|tan|log|ln|exp|[xyz]{2,3}|abc?|bc|ac)\b")
"""Words of formulas, and products that are written like words."""
_IS_MORE = re.compile(r"[-+*/^=()\[\]{}<>,;:]|\d\s*[A-Za-z]|[a-z]\(|\bor\b|\band\b|pi")
_MEASURED = re.compile(r"[-+$]?[\d,. ]*\d\s*%?|[-+]?[\d.]+\s*[A-Za-z](?:\^-?\d)?(?:\s*/\s*[A-Za-z](?:\^-?\d)?)?")
_THOUSANDS = re.compile(r"[-+$]?\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?|[-+$]?\d*\.?\d+\s*%?")


def as_formula(bare: str) -> str | None:
    """A text that is a formula as a whole, such as `y = 2x + 1`, `3, 5` or `2pi`, as LaTeX between dollar signs; else None.

    Without these math-verify reads its last number only. A number, one with a unit, and sums of numbers alone are none.
    """
    if len(bare) > 1000 or any(mark in bare for mark in "$\\#\n") or re.search(r"[A-Za-z]{2}", _NAMES.sub("", bare)):
        return None
    if mixed := re.fullmatch(r"(-?\d+) (\d+)/(\d+)", bare):
        return "${}\\frac{{{}}}{{{}}}$".format(*mixed.groups())
    if power := re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d{1,3})", bare):
        return "${}\\times 10^{{{}}}$".format(*power.groups())
    value = re.sub(r"^[A-Za-z]\s*=\s*", "", bare)
    is_number = _MEASURED.fullmatch(value) is not None and ("," not in value or _THOUSANDS.fullmatch(value) is not None)
    if is_number or not _IS_MORE.search(bare) or ("=" in bare and not re.search(r"[A-Za-z]", bare)):
        return None
    return "$" + _LATEX_NAMES.sub(r"\\\1 ", bare.replace("**", "^")) + "$"


_RELATION = re.compile(r"=|\\approx(?![a-z])|\\simeq|≈")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}")
_SPACE = re.compile(r"[\s~$°]|\\[!,;: %$]|%|\\left|\\right|\\circ|\^\\circ|\^\{\\circ\}|\*\*$|\.$")
_GROUPED = re.compile(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))")
_FRACTION = re.compile(r"/|frac")
_WRITTEN = re.compile(
    r"(?P<sign>[-+]?)(?:"
    r"(?P<decimal>\d+(?:\.\d*)?|\.\d+)(?:[eE](?P<exponent>[-+]?\d{1,3})|(?:\\times|\\cdot|\*)10\^\{?(?P<power>[-+]?\d{1,3})\}?)?"
    r"|(?P<whole>\d*)\\[dt]?frac\{(?P<above>-?\d+)\}\{(?P<below>\d+)\}|(?P<over>\d+)/(?P<under>\d+)"
    r"|10\^\{?(?P<ten>[-+]?\d{1,3})\}?)",
    re.ASCII,
)


def written_number(text: Any, *, lowest_terms: bool = False) -> Fraction | None:
    """The number that `text` is a way to write: a decimal, with a power of ten or percent, or a fraction that is no integer.

    With `lowest_terms` a fraction that can be reduced is none, as 290/4.
    """
    in_one = _GROUPED.sub("", _WRAPPED.sub(r"\1", str(text)))
    plain = _SPACE.sub("", in_one).replace("\N{MINUS SIGN}", "-")
    if len(plain) > 1000:
        return None
    while plain.startswith("(") and plain.endswith(")"):
        plain = plain[1:-1]
    match = _WRITTEN.fullmatch(plain)
    if match is None:
        return None
    part = match.groupdict()
    try:
        if part["decimal"]:
            value = Fraction(part["decimal"]) * Fraction(10) ** int(part["exponent"] or part["power"] or 0)
        elif part["ten"]:
            value = Fraction(10) ** int(part["ten"])
        else:
            below = int(part["below"] or part["under"])
            value = Fraction(int(part["above"] or part["over"]), below)
            if value.denominator == 1 or (lowest_terms and value.denominator != below):  # a division that is still to be done
                return None
            value += int(part["whole"] or 0)
    except ZeroDivisionError:
        return None
    return -value if part["sign"] == "-" else value


def says_number(text: Any, gold: Fraction, *, lowest_terms: bool = False) -> bool:
    """Return whether an answer, as `x = 1/3` or `1/3 \\approx 0.333`, ends in a number and has none that is over 1 %
    from `gold`.

    `lowest_terms` as for `written_number`: for a gold answer that is not written as a fraction.
    Whether it is the right one is for math-verify to say, which reads only one of them.
    """
    parts = [written_number(part, lowest_terms=lowest_terms) for part in _RELATION.split(str(text))]
    if parts[-1] is None:
        return False
    scales = (1, Fraction(1, 100), 100)  # of percent either side may have lost its sign
    return all(
        any(abs(part - gold * scale) <= abs(gold * scale) / 100 for scale in scales) for part in parts if part is not None
    )


def fuzzy_text_judge() -> Callable[[list[str]], Judge]:
    """(gold texts) → difflib's best ratio of any of them with the answer, None without gold texts."""
    from difflib import SequenceMatcher

    def about(golds: list[str]) -> Judge:
        return lambda answer: max((SequenceMatcher(None, gold, answer, autojunk=False).ratio() for gold in golds), default=None)

    return about


def json_schema_judge() -> Callable[[dict[str, Any]], Judge]:
    """(schema) → whether the value of the JSON text is valid under the schema."""
    from jsonschema.validators import validator_for

    return lambda schema: lambda text: float(validator_for(schema)(schema).is_valid(json.loads(text)))


def format_regex_judge() -> Callable[[str], Judge]:
    """(pattern) → whether all of the response matches."""
    return lambda pattern: lambda response: float(re.fullmatch(pattern, response) is not None)


JUDGES: dict[str, Callable[[], Callable[..., Judge]]] = {
    "math_verify": math_verify_judge,
    "reasoning_gym": reasoning_gym_judge,
    "fuzzy_text": fuzzy_text_judge,
    "json_schema": json_schema_judge,
    "format_regex": format_regex_judge,
}
