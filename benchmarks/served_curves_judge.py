"""The cookbook's arithmetic task for benchmarks/served_curves.py: which sums a step asks, what an answer earns, and what a
model earns on sums that no step asked, by transformers and PEFT."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from megarl.data.sample import Sample

LARGEST, MAX_TOKENS = 100, 5
FORMAT_COST = 0.1
Sum = tuple[int, int]


def sums_of_step(step: int, count: int) -> list[Sum]:
    """The sums that the recipe draws for a step, counted from 0."""
    draw = np.random.RandomState(step)
    return [(int(draw.randint(0, LARGEST + 1)), int(draw.randint(0, LARGEST + 1))) for _ in range(count)]


def held_out(steps: int, per_step: int, count: int) -> list[Sum]:
    """Sums that none of the first `steps` steps asks."""
    asked = {one for step in range(steps) for one in sums_of_step(step, per_step)}
    others = [(left, right) for left in range(LARGEST + 1) for right in range(LARGEST + 1) if (left, right) not in asked]
    return random.Random(0).sample(others, count)


def earned(text: str, total: int, *, ended: bool) -> float:
    """1 if the last whole number of an answer is the sum, and a tenth less for an answer that was cut (`ended` false)."""
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    right = bool(numbers) and int(numbers[-1]) == total
    return float(right) - (0.0 if ended else FORMAT_COST)


def recipe_reward(sample: Sample) -> float:
    """The recipe's reward, for a run of megarl; the row has the sum as `answer`."""
    return earned(sample.response_text, int(sample.row["answer"]), ended=not sample.truncated)


def judge(model: Any, tokenizer: Any, rows: list[tuple[list[int], int]], end: int, draws: int) -> tuple[float, float]:
    """Mean reward of `draws` answers to each prompt at temperature 1, and its standard error over answers.

    Answers of one prompt that begin alike are computed once, as many as they are.

    Args:
        rows: token ids of a prompt, and the sum.
        end: id of the token that ends an answer.
        draws: answers to each prompt.
    """
    random_numbers = np.random.default_rng(0)
    open_answers: dict[tuple[int, tuple[int, ...]], int] = {(row, ()): draws for row in range(len(rows))}
    rewards = np.zeros((len(rows), 2))  # of each prompt's answers, the sum and the sum of squares
    for _ in range(MAX_TOKENS):
        nexts: Counter[tuple[int, tuple[int, ...]]] = Counter()
        keys = list(open_answers)
        for start in range(0, len(keys), 512):
            some = keys[start : start + 512]
            chances = _next_token([rows[row][0] + list(answer) for row, answer in some], model)
            counts = random_numbers.multinomial([open_answers[key] for key in some], chances)
            for place, token in zip(*np.nonzero(counts), strict=True):
                row, answer = some[place]
                if token == end:
                    _count(rewards[row], earned(tokenizer.decode(answer), rows[row][1], ended=True), counts[place, token])
                else:
                    nexts[row, (*answer, int(token))] += int(counts[place, token])
        open_answers = dict(nexts)
    for (row, answer), count in open_answers.items():
        _count(rewards[row], earned(tokenizer.decode(answer), rows[row][1], ended=False), count)
    means = rewards[:, 0] / draws
    variances = np.maximum(rewards[:, 1] / draws - means**2, 0.0) / draws
    return float(means.mean()), float(np.sqrt(variances.sum()) / len(rows))


def _count(of_row: np.ndarray, reward: float, times: int) -> None:
    of_row += (reward * times, reward**2 * times)


def _next_token(sequences: list[list[int]], model: Any) -> np.ndarray:
    """Chances of the next token of each sequence, float64 `[B, V]`."""
    import torch

    length = max(map(len, sequences))
    tokens = torch.tensor([sequence + [0] * (length - len(sequence)) for sequence in sequences])
    last = torch.tensor([len(sequence) - 1 for sequence in sequences])
    with torch.no_grad():
        logits = model(tokens).logits[torch.arange(len(sequences)), last]
    chances = logits.double().softmax(-1).numpy()
    return chances / chances.sum(1, keepdims=True)


def judged(folder: Path, adapter: Path | None, sums: list[Sum], draws: int) -> tuple[float, float]:
    """`judge` of a model folder with the adapters of a PEFT folder, or without."""
    import torch
    from served_curves_model import END, prompt
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    rows = [(tokenizer.encode(prompt(*one), add_special_tokens=False), sum(one)) for one in sums]
    return judge(model.eval(), tokenizer, rows, tokenizer.convert_tokens_to_ids(END), draws)
