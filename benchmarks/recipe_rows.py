"""What served_recipes.py gives to recipes of the cookbook where they would download: rows, and a small model and tokenizer.

`datasets` and `transformers` take a folder of the working directory for a data set or a model of that name, so the recipes
find these by the names that they have: `openai/gsm8k`, `Qwen/Qwen3-4B-Instruct-2507` and so on.

The model answers whatever it is asked with one of a few phrases (`answer`), drawn by chance: some are in the form that a
recipe rewards, and some are right, so that rewards of a group differ and a recipe has something to learn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ENGLISH = ("docs/glossary.md", "docs/training.md")
"""Text for the tokenizer's merges, beside the rows."""
VOCABULARY = 1024
TEACHING_STEPS, TEACHING_ROWS, TEACHING_LR = 200, 16, 3e-3
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ("Ann", "Bo", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("apples", "books", "coins", "stamps", "shells")
WORDS = (
    "the",
    "of",
    "after",
    "before",
    "during",
    "into",
    "known",
    "later",
    "many",
    "most",
    "only",
    "over",
    "time",
    "until",
    "light",
)


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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Pairs of bytes merged as English and the rows have them, and the marks of a chat."""
    draw = random.Random(0)
    texts = [*((ROOT / page).read_text() for page in ENGLISH), *(question(draw)[0] + answer(draw) for _ in range(500))]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [AddedToken(token, special=True) for token in SPECIAL]
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def taught(tokenizer: PreTrainedTokenizerFast, draw: random.Random) -> tuple[list[int], int]:
    """A prompt of words about anything, with an answer; token ids, and how many of them are the prompt's."""
    words = " ".join(draw.choices([*WORDS, *THINGS, *NAMES], k=int(4 ** draw.uniform(1, 3.5))))
    prompt = tokenizer.encode(f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    said = tokenizer.encode(answer(draw) + "<|im_end|>", add_special_tokens=False)
    return [*prompt, *said], len(prompt)


def teach(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train the model, in place, to answer any prompt with one of `answer`'s phrases."""
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TEACHING_LR, betas=(0.9, 0.95))
    for step in range(TEACHING_STEPS):
        optimizer.param_groups[0]["lr"] = TEACHING_LR * (1 - step / TEACHING_STEPS)
        tokens, targets = batch([taught(tokenizer, draw) for _ in range(TEACHING_ROWS)])
        loss = cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def batch(rows: Sequence[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows right-padded to int64 `[B, T]`, and the same with -100 wherever it is not an answer's token."""
    tokens = torch.zeros(len(rows), max(len(ids) for ids, _ in rows), dtype=torch.int64)
    targets = torch.full_like(tokens, -100)
    for row, (ids, prompt) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        targets[row, prompt : len(ids)] = tokens[row, prompt : len(ids)]
    return tokens, targets


def write_model(folder: Path) -> None:
    """A Llama of two layers, 64 wide, with a tokenizer that knows the marks of Qwen's chats, and float32 weights."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    teach(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
