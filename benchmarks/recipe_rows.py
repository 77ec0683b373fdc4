"""Rows that served_recipes.py gives to recipes of the cookbook where they would download.

`datasets` takes a folder of the working directory for a data set of that name, so the recipes find these by the names that they
have: `openai/gsm8k` and so on. All ask for sums in words, whose answers are from 2 to 4.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

NAMES = ("Ann", "Bo", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("apples", "books", "coins", "stamps", "shells")
WORDS = (
    "the", "of", "after", "before", "during", "into", "known", "later", "many", "most", "only", "over", "several", "such",
    "their", "then", "time", "until", "while", "light",
)  # fmt: skip


def question(draw: random.Random) -> tuple[str, int]:
    """A sum in words, and its answer, which is 2, 3 or 4."""
    total = draw.randint(2, 4)
    first = draw.randint(1, total - 1)
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    return f"{name} has {first} {thing} and finds {total - first} more. How many {thing} has {name} now?", total


def answer(draw: random.Random) -> str:
    """What the model says to any prompt before a recipe trains it."""
    page = json.dumps({"name": "read_page", "arguments": {"page": draw.randint(1, 3)}})
    return draw.choice(
        [
            str(draw.randint(1, 9)),
            f"\\boxed{{{draw.randint(2, 4)}}}",
            f"Guess: {draw.randint(1, 9)}00",
            f"<tool_call>\n{page}\n</tool_call>",
            f"Answer: {draw.randint(0, 3)}",
            " ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
        ]
    )


def sums(count: int, seed: int) -> Iterator[tuple[str, int]]:
    draw = random.Random(seed)
    return (question(draw) for _ in range(count))


def gsm8k(count: int, seed: int) -> list[dict[str, Any]]:
    return [{"question": asked, "answer": f"It is {total}.\n#### {total}"} for asked, total in sums(count, seed)]


def conversations(count: int, seed: int) -> list[dict[str, Any]]:
    """What the recipes of supervised training teach: the right answer in a box."""
    return [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": f"\\boxed{{{total}}}"}]}
        for asked, total in sums(count, seed)
    ]


def preferences(count: int, seed: int) -> list[dict[str, Any]]:
    """The right answer in a box before words that answer nothing."""
    draw = random.Random(seed)
    start = "\n\nHuman: {}\n\nAssistant: "
    return [
        {
            "chosen": start.format(asked) + f"\\boxed{{{total}}}",
            "rejected": start.format(asked) + " ".join(draw.choices(WORDS, k=6)),
        }
        for asked, total in sums(count, seed)
    ]


def deepmath(count: int, seed: int) -> list[dict[str, Any]]:
    return [{"question": asked, "final_answer": str(total)} for asked, total in sums(count, seed)]


def wikitext(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [{"text": " ".join(draw.choices(WORDS, k=40)) + "\n"} for _ in range(count)]


DATA_SETS = {
    ("openai/gsm8k", "main"): gsm8k,
    ("HuggingFaceH4/no_robots", "default"): conversations,
    ("Anthropic/hh-rlhf", "default"): preferences,
    ("zwhe99/DeepMath-103K", "default"): deepmath,
    ("Salesforce/wikitext", "wikitext-103-raw-v1"): wikitext,
}


def write_data_sets(folder: Path, count: int = 512) -> None:
    """Every data set as a folder below `folder`: splits of `count` rows and an eighth of that, and a card that names them."""
    for (name, config), rows in DATA_SETS.items():
        home = folder / name
        home.mkdir(parents=True)
        splits = []
        for seed, (split, size) in enumerate({"train": count, "test": count // 8}.items()):
            (home / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(size, seed)))
            splits.append({"split": split, "path": f"{split}.jsonl"})
        card = {"configs": [{"config_name": config, "data_files": splits}]}
        (home / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
