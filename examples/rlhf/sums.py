"""Rows of the RLHF example: demonstrations by a careless teacher, and preferences of a careful one, about small sums."""

from __future__ import annotations

SUMS = [(f"Calculate {a} + {b}.", a + b) for a in range(11) for b in range(11)]


def demonstrations() -> list[dict[str, str]]:
    """Every sum twice, once answered rightly and once with one too many."""
    return [{"prompt": question, "response": str(answer + extra)} for question, answer in SUMS for extra in (0, 1)]


def preferences(*, held_out: bool = False) -> list[dict[str, str]]:
    """The right answer preferred to a wrong one that is at most 3 off; every fifth such pair is held out."""
    wrong = (1, -1, 2, -2, 3, -3)
    pairs = [(question, answer, answer + off) for question, answer in SUMS for off in wrong if answer + off >= 0]
    rows = [{"prompt": question, "chosen": str(answer), "rejected": str(other)} for question, answer, other in pairs]
    return [row for number, row in enumerate(rows) if (number % 5 == 2) == held_out]


def labels(*, held_out: bool = False) -> list[dict[str, str | bool]]:
    """The same as single answers, labelled right or wrong."""
    return [
        {"prompt": row["prompt"], "response": row[side], "label": side == "chosen"}
        for row in preferences(held_out)
        for side in ("chosen", "rejected")
    ]
