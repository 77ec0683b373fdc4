"""The verifiers that judge in a process of their own. Imported by path from `judge_child.py`: nothing of megarl.

A judge comes in two halves: from the row (trusted, prepared once and kept) to a function of the answer (run in a fork).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from typing import Any

Judge = Callable[[str], float | None]
"""From an answer to a number from 0 to 1, or None where it cannot be judged."""


def reasoning_gym_judge() -> Callable[[str, dict[str, Any], dict[str, Any]], Judge]:
    """(task, its arguments, row) → the task's score, or None where the task raises on the answer."""
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


def math_verify_judge() -> Callable[[str], Judge]:
    """(gold) → whether the response's final answer equals the gold one, None if that is no mathematics."""
    from math_verify import parse, verify

    def about(gold: str) -> Judge:
        parsed_gold = parse_gold(gold)

        def judge(response: str) -> float | None:
            if not parsed_gold:
                return None
            try:
                # No timeouts: they are alarm signals, which wait for the end of an operation in C.
                return float(verify(parsed_gold, parse(response, parsing_timeout=None), timeout_seconds=None))
            except (MemoryError, RecursionError):
                return 0.0

        return judge

    # math-verify turns its own errors into False; the second loads its reader of LaTeX, once for all forks
    if about("1")("1") != 1 or about("1")("$\\frac{4}{2}$") != 0:
        sys.exit("math-verify does not work here")
    return about


def parse_gold(gold: str) -> list[Any]:
    """The expressions in `gold`, empty if it has none. LaTeX or a formula need not stand between dollar signs."""
    from math_verify import parse

    bare = gold.strip()
    is_latex = "\\" in bare and "$" not in bare and "\\boxed" not in bare
    is_formula = bool(re.search(r"[-+*/^=()\[\]{}<>]", bare)) and not re.search(r"[A-Za-z]{2}", bare)
    tries = [f"${bare}$"] if is_latex else [bare, f"${bare}$"] if is_formula else [bare]
    for text in tries:
        found = parse(text, parsing_timeout=None)
        # math-verify adds the matched text as a string; alone, it means that the text is no mathematics
        if any(not isinstance(expression, str) for expression in found):
            return found
    return []


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
