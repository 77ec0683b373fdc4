"""Rows to evaluate on, made here so that nothing is downloaded: multiple choice, and small programs with their tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

PROGRAMS: dict[str, tuple[str, list[str]]] = {
    "double(n)": ("returns twice n", ["assert double(3) == 6", "assert double(-1) == -2"]),
    "largest(items)": (
        "returns the largest of a list",
        ["assert largest([3, 9, 2]) == 9", "assert largest([-4]) == -4"],
    ),
    "is_even(n)": ("returns whether n is even", ["assert is_even(4) is True", "assert is_even(7) is False"]),
    "backwards(text)": ("returns a text backwards", ["assert backwards('abc') == 'cba'", "assert backwards('') == ''"]),
    "total(numbers)": ("returns the sum of a list", ["assert total([1, 2, 3]) == 6", "assert total([]) == 0"]),
    "vowels(text)": ("returns the number of vowels in a text", ["assert vowels('banana') == 3", "assert vowels('xyz') == 0"]),
    "factorial(n)": ("returns the factorial of n", ["assert factorial(5) == 120", "assert factorial(0) == 1"]),
    "unique(items)": (
        "returns a list without repetitions",
        ["assert unique([2, 1, 2]) == [2, 1]", "assert unique([]) == []"],
    ),
}


def multiple_choice(rows: int = 64, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`rows` sums with four choices each; row i depends on `seed` + i alone. The `topic` is `addition` or `subtraction`."""
    for row in range(rows):
        chance = random.Random(seed + row)
        a, b = chance.randint(10, 60), chance.randint(1, 9)
        topic = chance.choice(["addition", "subtraction"])
        right = a + b if topic == "addition" else a - b
        values = [right, *chance.sample([right - 10, right - 2, right - 1, right + 1, right + 2, right + 10], 3)]
        chance.shuffle(values)
        listed = " ".join(f"({letter}) {value}" for letter, value in zip("ABCD", values, strict=True))
        asked = f"What is {a} {'+' if topic == 'addition' else '-'} {b}? {listed} Answer with one letter in brackets."
        yield {"question": asked, "answer": "ABCD"[values.index(right)], "topic": topic}


def programs() -> Iterator[dict[str, Any]]:
    """Eight functions to be written; the `tests` are assert statements."""
    for signature, (what, tests) in PROGRAMS.items():
        yield {"question": f"Write a Python function {signature} that {what}. Answer with one code block.", "tests": tests}
