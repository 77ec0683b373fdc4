"""Sums of two small numbers as prompts and answers: the task of the tiny examples, and what their model is warmed up on."""

from __future__ import annotations

import random

LARGEST = 9


def sums(rows: int, seed: int, held_out: bool = False) -> list[dict[str, str]]:
    """`rows` sums such as `{"question": "8+7=", "answer": "15"}`, the same for the same seed.

    Every tenth pair of numbers is held out: asked for with `held_out`, and never drawn without it.
    """
    generator = random.Random(seed)
    numbers = range(LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers if ((3 * a + b) % 10 == 0) == held_out]
    return [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in generator.choices(pairs, k=rows)]
