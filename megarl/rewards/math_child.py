"""The program of a math-verify child process: JSON lines `[gold, response, timeout_s]` in, `true`, `false` or `null` out.

A process of its own, because an answer such as 9^9^9^9 stops the interpreter that evaluates it. Run by path: it
imports nothing of megarl. `null` says that the gold answer cannot be parsed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 4 << 30


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    if judge("1", "1") is not True or judge("1", "2") is not False:  # math-verify turns its own errors into False
        sys.exit("math-verify does not work here")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        gold, response, timeout_s = json.loads(line)
        # The default action ends this process, even inside an operation in C and even if the parent is gone.
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        verdict = judge(gold, response)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=answers, flush=True)


def judge(gold: str, response: str) -> bool | None:
    """Whether the final answer of `response` equals `gold`, or None if there is nothing to compare with in `gold`."""
    from math_verify import parse, verify

    parsed_gold = parse_gold(gold)
    if not parsed_gold:
        return None
    try:
        # No timeouts: they are alarm signals, which wait for the end of an operation in C.
        return bool(verify(parsed_gold, parse(response, parsing_timeout=None), timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False


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


if __name__ == "__main__":
    main()
