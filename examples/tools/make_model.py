"""Make a tiny Llama that could solve word problems with a calculator, but has bad habits: where calculator.yaml starts from.

Usage: python examples/tools/make_model.py OUT_FOLDER. Random weights, then supervised training on transcripts of chats: two in
eight call the calculator with what the problem asks, three with another sign, three guess an answer. So its sampled answers are
right a quarter of the time, its likeliest ones never. The folder appears whole or not at all; it takes a few minutes.
"""

from __future__ import annotations

import random
import re
import sys
import time
from pathlib import Path

import torch
from calculator import NAMES, QUESTIONS, THINGS, calculator, problem
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from megarl.system.atomic_files import whole_folder
from megarl.system.hidden_bars import hide_bars

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
BEGIN, END = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
PIECE = r"<tool_call>|</tool_call>|\{\"name\": \"calculator\", \"arguments\": \{\"expression\": \"|\"\}\}| ?[A-Za-z]+|[\s\S]"
CORPUS = [
    *(text.format(name=name, thing=thing, a=0, b=0) for text in QUESTIONS.values() for name in NAMES for thing in THINGS),
    BEGIN + END,
    "system\nuser\nassistant\ntool\nYou may call calculator.error: characters 0123456789+-*()",
]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call {% for tool in tools %}{{ tool.function.name }}{% endfor %}."
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMAS = [{"type": "function", "function": {"name": "calculator"}}]  # all that the template reads of it
HABITS = ["right"] * 2 + ["other sign"] * 3 + ["guess"] * 3
BATCH, STEPS, PEAK_LR = 64, 300, 3e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words with the space before them, single digits and signs; the tags and braces of a tool call are a token each."""
    words = list(dict.fromkeys([*SPECIAL, *(piece for text in CORPUS for piece in re.findall(PIECE, text))]))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<pad>", chat_template=TEMPLATE,
        model_max_length=128,
    )  # fmt: skip


def make_model(vocabulary: int) -> torch.nn.Module:
    """A Llama that splits into two tensor-parallel ranks and two pipeline stages, with random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=None, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def transcript(numbers: random.Random, habit: str) -> list[dict[str, str]]:
    """A chat about a problem by one of the `HABITS`."""
    row = problem(numbers)
    messages = [{"role": "user", "content": row["question"]}]
    if habit == "guess":
        return [*messages, {"role": "assistant", "content": str(numbers.randint(0, 9999))}]
    expression = row["expression"]
    if habit == "other sign":
        expression = expression.translate(str.maketrans("+-*", "*+-"))
    result = calculator(expression)
    return [
        *messages,
        {"role": "assistant", "content": f"{BEGIN}{expression}{END}"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def encode(tokenizer: PreTrainedTokenizerFast, chats: list[list[dict[str, str]]]) -> tuple[Tensor, Tensor]:
    """Chats as ids int64 `[B, T]`, right-padded, and a mask bool `[B, T]` of what the assistant says, with its end tokens."""
    rows = []
    for chat in chats:
        ids: list[int] = []
        mask: list[bool] = []
        for turn, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            before = tokenizer.apply_chat_template(chat[:turn], tools=SCHEMAS, add_generation_prompt=True, tokenize=False)
            told = tokenizer(before, add_special_tokens=False)["input_ids"]
            said = tokenizer(message["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
            mask += [False] * (len(told) - len(ids)) + [True] * len(said)
            ids = told + said
        rows.append((ids, mask))
    length = max(len(ids) for ids, _ in rows)
    tokens, masks = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.bool)
    for number, (ids, mask) in enumerate(rows):
        tokens[number, : len(ids)] = torch.tensor(ids)
        masks[number, : len(ids)] = torch.tensor(mask)
    return tokens, masks


def warm_up(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, steps: int = STEPS) -> float:
    """Teach the habits; returns the loss at the end, in nats per token."""
    numbers = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        tokens, mask = encode(tokenizer, [transcript(numbers, HABITS[number % len(HABITS)]) for number in range(BATCH)])
        logits = model(tokens[:, :-1]).logits
        wanted = mask[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[wanted], tokens[:, 1:][wanted])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: {loss.item():.3f} nats per token", flush=True)
    return loss.item()


def make(out: Path) -> float:
    """Write the model and its tokenizer to `out`; returns the loss at the end."""
    torch.set_num_threads(1)  # so that the sums of floats, and with them the model, do not depend on the machine's cores
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    loss = warm_up(model, tokenizer)
    with whole_folder(out) as part:
        hide_bars()
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
    return loss


def main() -> None:
    """Make the model unless the folder is there already."""
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/tools/make_model.py OUT_FOLDER")
    out = Path(sys.argv[1])
    if (out / "config.json").exists():
        print(f"{out} is already there")
        return
    started = time.monotonic()
    loss = make(out)
    print(f"wrote {out}: {loss:.3f} nats per token, made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
