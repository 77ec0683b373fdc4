"""The small model that served_recipes.py serves, and its tokenizer.

It answers whatever it is asked with one of a few phrases (`recipe_rows.answer`), drawn by chance: some are in the form that a
recipe rewards, and some are right, so that rewards of a group differ and a recipe has something to learn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from recipe_rows import NAMES, THINGS, WORDS, answer, question
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ENGLISH = ("docs/glossary.md", "docs/training.md")
"""Text for the tokenizer's merges, beside the rows."""
VOCABULARY = 1024
TEACHING_STEPS, TEACHING_ROWS, TEACHING_LR = 250, 16, 3e-3
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
    words = " ".join(draw.choices([*WORDS, *THINGS, *NAMES], k=int(4 ** draw.uniform(1, 4))))
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
