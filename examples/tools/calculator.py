"""The calculator example: a tool, and word problems that are hard for a tiny model without it."""

from __future__ import annotations

import ast
import operator
import random

NAMES = ["Ada", "Ben", "Cleo", "Dan"]
THINGS = ["apples", "books", "coins", "stamps"]
QUESTIONS = {
    "+": "{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
    "-": "{name} has {a} {thing} and gives away {b}. How many {thing} does {name} have left?",
    "*": "{name} fills {a} boxes with {b} {thing} each. How many {thing} does {name} need?",
}
COMPUTE = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> str:
    """
    Compute an arithmetic expression of whole numbers with + - * and brackets.

    Args:
        expression: what to compute, such as 12*7
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in COMPUTE:
            return COMPUTE[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only whole numbers, + - * and brackets can be computed")

    return str(value(ast.parse(expression, mode="eval").body))


def problem(numbers: random.Random) -> dict[str, str]:
    """A word problem: its `question`, the `expression` that solves it, and the `answer`."""
    sign = numbers.choice(list(QUESTIONS))
    a, b = sorted((numbers.randint(10, 99), numbers.randint(10, 99)), reverse=True)
    question = QUESTIONS[sign].format(a=a, b=b, name=numbers.choice(NAMES), thing=numbers.choice(THINGS))
    expression = f"{a}{sign}{b}"
    return {"question": question, "expression": expression, "answer": calculator(expression)}


def word_problems(rows: int, seed: int) -> list[dict[str, str]]:
    """`rows` problems; another `seed` gives others."""
    numbers = random.Random(seed)
    return [problem(numbers) for _ in range(rows)]
