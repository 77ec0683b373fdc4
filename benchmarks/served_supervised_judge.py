"""Rows of benchmarks/served_supervised.py, in the order in which the cookbook's recipes take them, and what a model makes of
rows that it was not trained on, by transformers and PEFT.

All are sums in words with totals from 2 to 9. Some questions are kept for the end; each name has a form of answer of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from recipe_rows import NAMES, THINGS, WORDS

Message = dict[str, str]
Question = tuple[str, str, int, int]
"""Who, of what, and the two numbers."""
FORMS = ("\\boxed{{{total}}}", "{name} has {total} {thing}.", "{first} and {second} is {total}. \\boxed{{{total}}}")
KEPT = 216
"""Questions, a fifth of all, that no training row asks."""
NO_ROBOTS, PAIRS = "HuggingFaceH4/no_robots", "Anthropic/hh-rlhf"
BETA = 0.1


def questions(*, kept: bool) -> list[Question]:
    """Those for training, or those that are kept for the end."""
    numbers = [(first, total - first) for total in range(2, 10) for first in range(1, total)]
    every = [(name, thing, *pair) for name in NAMES for thing in THINGS for pair in numbers]
    random.Random(0).shuffle(every)
    return every[:KEPT] if kept else every[KEPT:]


def asked(question: Question) -> str:
    """A question in words."""
    name, thing, first, second = question
    return f"{name} has {first} {thing} and finds {second} more. How many {thing} has {name} now?"


def answered(question: Question, error: int = 0) -> str:
    """Its answer in the form of its name, wrong by `error`."""
    name, thing, first, second = question
    form = FORMS[NAMES.index(name) % len(FORMS)]
    return form.format(name=name, thing=thing, first=first, second=second, total=first + second + error)


def conversations(count: int, seed: int, *, kept: bool = False) -> list[dict[str, Any]]:
    """Rows of `messages`: a question and its answer, in half of them two of each."""
    draw, known = random.Random(f"conversations/{seed}"), questions(kept=kept)
    rows = []
    for _ in range(count):
        turns = [draw.choice(known) for _ in range(draw.randint(1, 2))]
        pairs = [(("user", asked(one)), ("assistant", answered(one))) for one in turns]
        rows.append({"messages": [{"role": role, "content": said} for pair in pairs for role, said in pair]})
    return rows


def preferences(count: int, seed: int, *, kept: bool = False) -> list[dict[str, Any]]:
    """Rows of `prompt`, `chosen`, the answer, and `rejected`, which is a wrong answer or some words."""
    draw, known = random.Random(f"preferences/{seed}"), questions(kept=kept)
    rows = []
    for _ in range(count):
        one = draw.choice(known)
        wrong = answered(one, draw.choice((-1, 1)))
        words = " ".join(draw.choices(WORDS, k=draw.randint(2, 8)))
        prompt = [{"role": "user", "content": asked(one)}]
        rows.append({"prompt": prompt, "chosen": answered(one), "rejected": draw.choice((wrong, words))})
    return rows


def in_order(rows: Sequence[dict[str, Any]], shuffles: int) -> list[dict[str, Any]]:
    """Rows as `datasets` has them behind so many times `shuffle(seed=0)`, with their number from 0 as `order`."""
    order = np.arange(len(rows))
    for _ in range(shuffles):
        order = order[np.random.default_rng(0).permutation(len(rows))]
    return [rows[row] | {"order": number} for number, row in enumerate(order.tolist())]


def as_dialogue(row: dict[str, Any]) -> dict[str, str]:
    """A pair as Anthropic's data set has it: two texts."""
    start = f"\n\nHuman: {row['prompt'][0]['content']}\n\nAssistant: "
    return {side: start + row[side] for side in ("chosen", "rejected")}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data_set(home: Path, train: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]]) -> None:
    """A folder that `datasets` takes for a data set of the hub whose name it has."""
    home.mkdir(parents=True, exist_ok=True)
    splits = {"train": train, "test": test}
    for split, rows in splits.items():
        write_rows(home / f"{split}.jsonl", rows)
    files = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
    card = {"configs": [{"config_name": "default", "data_files": files}]}
    (home / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")


@dataclass(frozen=True)
class Told:
    """Of a conversation, over the tokens of its answers: the sum of their log-probs, their number, and whether each of them
    is the most probable one."""

    log_prob: float
    tokens: int
    is_right: bool


def encoded(tokenizer: Any, messages: Sequence[Message], *, last_only: bool) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation in Qwen's form, and of each whether it is an answer's; an answer has its end mark."""
    ids: list[int] = []
    is_answer: list[bool] = []
    for number, message in enumerate(messages):
        head = ("\n" if number else "") + f"<|im_start|>{message['role']}\n"
        trained = message["role"] == "assistant" and (not last_only or number == len(messages) - 1)
        for text, is_trained in ((head, False), (message["content"] + "<|im_end|>", trained)):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            is_answer += [is_trained] * len(piece)
    return ids, is_answer


def told(model: Any, rows: Sequence[tuple[list[int], list[bool]]]) -> Iterator[Told]:
    """What a model says of rows that are token ids, and of each whether it counts."""
    import torch

    for ids, counts in rows:
        tokens, mask = torch.tensor([ids]), torch.tensor(counts)[1:]
        with torch.no_grad():
            log_probs = model(tokens).logits[0, :-1].double().log_softmax(-1)[mask]
        targets = tokens[0, 1:][mask]
        chosen = log_probs.gather(1, targets[:, None])
        yield Told(float(chosen.sum()), len(targets), bool((log_probs.argmax(1) == targets).all()))


def loaded(folder: Path, adapter: Path | None) -> tuple[Any, Any]:
    """The model in a folder with the adapters of a PEFT folder, or without, in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def judged_answers(folder: Path, adapter: Path | None, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`loss`, the mean over conversations of the mean cross-entropy of their answers' tokens, in nats, and `accuracy`, the
    share of conversations whose answers greedy decoding gives."""
    model, tokenizer = loaded(folder, adapter)
    found = [*told(model, [encoded(tokenizer, row["messages"], last_only=False) for row in rows])]
    losses = [-one.log_prob / one.tokens for one in found]
    return {"loss": float(np.mean(losses)), "accuracy": float(np.mean([one.is_right for one in found]))}


def judged_pairs(folder: Path, adapter: Path | None, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """DPO's `loss` against the model without the adapters, in nats, and `accuracy`, the share of pairs whose chosen side gained
    more; pairs of which neither did count as half."""
    gains = []
    for side in ("chosen", "rejected"):
        log_probs = []
        for of in (adapter, None):
            model, tokenizer = loaded(folder, of)
            turns = [[*row["prompt"], {"role": "assistant", "content": row[side]}] for row in rows]
            found = told(model, [encoded(tokenizer, messages, last_only=True) for messages in turns])
            log_probs.append(np.array([one.log_prob for one in found]))
        gains.append(log_probs[0] - log_probs[1])
    margins = gains[0] - gains[1]
    return {"loss": float(np.logaddexp(0, -BETA * margins).mean()), "accuracy": float((np.sign(margins) + 1).mean() / 2)}
