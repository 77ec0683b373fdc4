"""`code_tests`: 1 if the program in the response passes all unit tests of its row, else 0 (or the fraction that passes).

The program is the last fenced Python block, or else the last fenced block without a language, or else the whole response.
It runs in the sandbox, or not at all.
"""

from __future__ import annotations

import ast
import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megarl.data.final_answer import without_thoughts
from megarl.data.sample import Sample
from megarl.errors import RewardError
from megarl.rewards.sandbox.program import OutOfTimeError, SandboxLimits, run_program, run_tests
from megarl.rewards.scorer import Verdict, Verifier

# possessive: a fence whose line has no end would else be tried with every way to share out its characters
_FENCED = re.compile(r"^[ \t]*```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")


class CodeTests(Verifier):
    """The verifier over rows whose gold answer is a list of tests, or its JSON text.

    A test is Python text with assert statements, or `{"input": standard input, "output": what must be printed}`. Such text
    alone is one test, and lists of inputs and outputs, as `{"inputs": [...], "outputs": [...]}`, are as many.
    """

    name = "code_tests"

    def __init__(
        self,
        answer_key: str,
        *,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        output_kb: int = 1024,
        partial: bool = False,
    ) -> None:
        """Args:
            answer_key: key of the tests in a row.
            timeout_s: wall-clock seconds of one run: all assert statements together, or one input.
            memory_mb: address space of a run.
            output_kb: what a run may print.
            partial: give the fraction of passed tests instead of 0 when not all pass. A program that runs out of time over an
                input fails that test and those behind it.

        Raises:
            RewardError: a limit is not positive, or this machine cannot hold the sandbox; the sentence says what is missing.
        """
        for name, limit in (("timeout_s", timeout_s), ("memory_mb", memory_mb), ("output_kb", output_kb)):
            if limit <= 0:
                raise self.error(f"{name} is {limit}; it must be above 0")
        super().__init__(answer_key)
        self.partial = partial
        self.limits = SandboxLimits(timeout_s, memory_mb << 20, output_kb << 10)
        try:
            works = run_program("print(1)", "", self.limits, time.monotonic() + 60)
        except OutOfTimeError:
            works = None
        except RewardError as error:
            raise self.error(str(error)) from None
        if works != "1\n":
            raise self.error(f"nothing runs within {timeout_s:g} s and {memory_mb} MB; raise the limits")

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """From 0 to 1, or None where the row's tests are no tests or `until` passed. As many runs at once as cores."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            return list(threads.map(lambda sample: self._judge(sample, until), samples))

    def _judge(self, sample: Sample, until: float) -> Verdict:
        tests = parsed_tests(self.gold(sample))
        if tests is None:
            return None
        code = extract_program(without_thoughts(sample.response_text))
        try:
            if isinstance(tests[0], str):
                passed = run_tests(code, tests, self.limits, until)
            else:
                passed = self._passed_inputs(code, tests, until)
        except TimeoutError:
            return None
        fraction = passed / len(tests)
        return fraction if self.partial else float(fraction == 1)

    def _passed_inputs(self, code: str, tests: Sequence[dict[str, str]], until: float) -> int:
        """What must be printed never enters the program's process, so it cannot be found there.

        The first input over which the program runs out of time is its last one: else it could cost that time once per input.
        """
        passed = 0
        for test in tests:
            try:
                printed = run_program(code, test["input"], self.limits, until)
            except OutOfTimeError:
                break
            right = printed is not None and _lines(printed) == _lines(test["output"])
            if not right and not self.partial:
                break
            passed += right
        return passed


def extract_program(response: str) -> str:
    """The program in `response`; a block that is not closed reaches to the end."""
    blocks = _FENCED.findall(response)
    for languages in (_PYTHON, ("",)):
        bodies = [body for language, body in blocks if language.lower() in languages]
        if bodies:
            return str(bodies[-1])
    return response


def parsed_tests(gold: Any) -> list[Any] | None:
    """The tests in a row, all of one kind; None if there are none or one is no test."""
    try:
        tests = _listed(json.loads(gold) if isinstance(gold, str) and not _asserts(gold) else gold)
        if not isinstance(tests, list) or not tests:
            return None
        if all(isinstance(test, str) for test in tests):
            for test in tests:
                compile(test, "test", "exec")
            return tests
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    pairs = all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests)
    texts = pairs and all(isinstance(test[key], str) for test in tests for key in ("input", "output"))
    return tests if texts else None


def _listed(gold: Any) -> Any:
    """One text of assert statements, and inputs and outputs that stand apart (APPS, CodeContests), as a list of tests."""
    if isinstance(gold, str):
        return [gold]
    if not isinstance(gold, dict) or gold.get("fn_name"):
        return gold
    inputs, outputs = (gold.get(f"{name}s", gold.get(name)) for name in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        return gold
    return [{"input": given, "output": printed} for given, printed in zip(inputs, outputs, strict=True)]


def _asserts(text: str) -> bool:
    """Return whether a text is Python that asserts something: the printed form of a list, which is Python too, does not."""
    if "assert" not in text or text.lstrip().startswith(("[", "{", '"')):
        return False
    return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text)))


def _lines(text: str) -> list[str]:
    """Lines without the white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
