"""Small coding tasks: a question, a test file that the agent may run in its sandbox, and hidden tests that judge its answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

# name, what it does, a solution
FUNCTIONS: list[tuple[str, str, Callable[[list[int]], Any]]] = [
    ("total", "the sum of the numbers in a list", sum),
    ("largest", "the largest number in a list", max),
    ("spread", "the largest number in a list less the smallest", lambda values: max(values) - min(values)),
    (
        "evens",
        "a list of the even numbers in a list, in their order",
        lambda values: [value for value in values if value % 2 == 0],
    ),
    ("backwards", "a list with the same numbers in reverse order", lambda values: values[::-1]),
    ("doubled", "a list with each number twice as large", lambda values: [2 * value for value in values]),
]


def task(numbers: random.Random) -> dict[str, Any]:
    """One task: `question`, `files` (the test file of the sandbox) and `answer` (the hidden tests)."""
    name, what, solution = numbers.choice(FUNCTIONS)

    def tests(count: int) -> list[str]:
        lists = [[numbers.randint(-9, 9) for _ in range(numbers.randint(2, 6))] for _ in range(count)]
        return [f"assert {name}({values}) == {solution(values)!r}" for values in lists]

    question = f"Write a Python function {name}(values) that returns {what}."
    example = tests(2)
    program = "\n".join([f"from solution import {name}", *example, "print('all tests pass')"])
    return {"question": question, "files": {"test_solution.py": program + "\n"}, "answer": [*example, *tests(6)]}


def coding_tasks(rows: int, seed: int) -> list[dict[str, Any]]:
    """`rows` tasks; another `seed` gives others."""
    numbers = random.Random(seed)
    return [task(numbers) for _ in range(rows)]
