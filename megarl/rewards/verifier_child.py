"""The program of a verifier's child process, which judges text that a model wrote. Run by path: it imports nothing of megarl.

A process of its own, because verifiers evaluate answers: 9**9**9**9 stops the interpreter, __import__('os') is a
program. In: the kind of verifier as argument, then lines of JSON `[base64 of the pickled question, timeout_s]`.
Out: `ready`, then a line per question, a number or `null` (cannot be judged).
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 4 << 30
_REFUSED = ("subprocess.", "socket.", "ctypes.", "shutil.", "urllib.", "webbrowser.", "os.")
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main(kind: str) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    sys.dont_write_bytecode = True
    judge: Callable[..., float | None] = JUDGES[kind]()
    sys.addaudithook(refuse_side_effects)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        question, timeout_s = json.loads(line)
        asked = pickle.loads(base64.b64decode(question))
        # The default action ends this process, even inside an operation in C and even if the parent is gone.
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        verdict = judge(*asked)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=answers, flush=True)


def refuse_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise at whatever would change something outside this process. It stops accidents; it is no sandbox."""
    writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & _WRITING)
    if writes or (event.startswith(_REFUSED) and event not in _HARMLESS):
        raise PermissionError(f"a verifier may not use {event}")


def reasoning_gym_judge() -> Callable[[str, dict[str, Any], str, dict[str, Any]], float | None]:
    """(task, its arguments, answer, row) → the task's score, or None where the task raises on the answer."""
    from reasoning_gym import create_dataset

    tasks: dict[bytes, Any] = {}

    def judge(task: str, arguments: dict[str, Any], answer: str, row: dict[str, Any]) -> float | None:
        key = pickle.dumps((task, arguments))
        try:
            if key not in tasks:
                tasks[key] = create_dataset(task, **arguments, seed=0, size=1)
            return float(tasks[key].score_answer(answer, row))
        except Exception:  # noqa: BLE001 - answers of an unexpected form; the failure is counted
            return None

    return judge


def math_verify_judge() -> Callable[[str, str], float | None]:
    """(gold, response) → whether the response's final answer equals the gold one, None if that is no mathematics."""
    from math_verify import parse, verify

    def judge(gold: str, response: str) -> float | None:
        parsed_gold = parse_gold(gold)
        if not parsed_gold:
            return None
        try:
            # No timeouts: they are alarm signals, which wait for the end of an operation in C.
            return float(verify(parsed_gold, parse(response, parsing_timeout=None), timeout_seconds=None))
        except (MemoryError, RecursionError):
            return 0.0

    if judge("1", "1") != 1 or judge("1", "2") != 0:  # math-verify turns its own errors into False
        sys.exit("math-verify does not work here")
    return judge


@lru_cache(maxsize=4096)
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


def fuzzy_text_judge() -> Callable[[list[str], str], float | None]:
    """(gold texts, answer) → difflib's best ratio of any of them with the answer, None without gold texts."""
    from difflib import SequenceMatcher

    def judge(golds: list[str], answer: str) -> float | None:
        return max((SequenceMatcher(None, gold, answer, autojunk=False).ratio() for gold in golds), default=None)

    return judge


def json_schema_judge() -> Callable[[dict[str, Any], str], float | None]:
    """(schema, JSON text) → whether the value is valid under the schema."""
    from jsonschema.validators import validator_for

    def judge(schema: dict[str, Any], text: str) -> float | None:
        return float(validator_for(schema)(schema).is_valid(json.loads(text)))

    return judge


def format_regex_judge() -> Callable[[str, str], float | None]:
    """(pattern, response) → whether all of the response matches."""
    return lambda pattern, response: float(re.fullmatch(pattern, response) is not None)


JUDGES: dict[str, Callable[[], Callable[..., float | None]]] = {
    "math_verify": math_verify_judge,
    "reasoning_gym": reasoning_gym_judge,
    "fuzzy_text": fuzzy_text_judge,
    "json_schema": json_schema_judge,
    "format_regex": format_regex_judge,
}

if __name__ == "__main__":
    main(sys.argv[1])
