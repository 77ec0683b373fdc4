"""Make a tiny Qwen2.5-VL that half knows how to count, or to read digits: where the examples in examples/vision start from.

Usage: python tools/model/tiny_vision.py OUT_FOLDER [--digits | --untrained]. Random weights, then supervised training on
pictures of one to five shapes (examples/vision/shapes.py) or, with --digits, of handwritten digits (examples/vision/digits.py),
stopped when about half of its likeliest answers are right; --untrained leaves that out. The folder appears whole or not at all;
it takes under a minute.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megarl.system.atomic_files import whole_folder
from megarl.system.hidden_bars import hide_bars

SPECIAL = ["<pad>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS = ["<unk>", "How", "many", "shapes", "?", "Which", "digit", *"0123456789"]
TOKENS = [*SPECIAL, *WORDS]
PAD, EOS, START, END, IMAGE, VIDEO = range(len(SPECIAL))
PATCH, MERGE = 14, 2
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "min_pixels": (PATCH * MERGE) ** 2,
    "max_pixels": 64 * (PATCH * MERGE) ** 2,
}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<eos>' if message.role == 'assistant' else ' ' -}}"
    "{%- endfor -%}"
)
"""Turns behind one another, the policy's with their end; its words have no room for roles."""
BATCH, MOST_STEPS, LR = 64, 400, 1e-3
FIRST_SEED = 10_000_000
"""Of the warm-up's pictures of shapes: no example's."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What a warm-up teaches: the rows of each step, those that judge it, and the share of right answers at which it ends."""

    rows_of_step: Callable[[int], list[Row]]
    held_out: list[Row]
    enough: float


def make_model() -> Any:
    """A Qwen2.5-VL that splits into two tensor-parallel ranks and two pipeline stages, with random weights."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": len(TOKENS), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rope_parameters": rope,
        "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 128, "patch_size": PATCH,
        "window_size": 56, "fullatt_block_indexes": [1], "in_chans": 3,
    }  # fmt: skip
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    ends = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens, **ends)
    return Qwen2_5_VLForConditionalGeneration(config).float()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words and single digits, and the tokens around pictures."""
    numbers = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def examples(first: int, count: int) -> list[Row]:
    """Rows of examples/vision/shapes.py."""
    return list(_example("shapes").count_shapes(count, first))


def counting() -> Task:
    """Pictures of shapes, none of them twice."""
    return Task(lambda step: examples(FIRST_SEED + step * BATCH, BATCH), examples(2 * FIRST_SEED, 256), 0.5)


def reading() -> Task:
    """Handwritten digits: the training split again and again, in one order; the example's held-out ones judge."""
    digits = _example("digits")
    rows = list(digits.digits("train"))
    random.Random(0).shuffle(rows)
    return Task(
        lambda step: [rows[n % len(rows)] for n in range(step * BATCH, (step + 1) * BATCH)],
        list(digits.digits("held_out")),
        0.4,
    )


def _example(name: str) -> Any:
    """A module of examples/vision."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "examples" / "vision" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> tuple[dict[str, Tensor], Tensor]:
    """What transformers takes of prompts with their answers, all of one length, and the answers' ids `[B]`."""
    processor = Qwen2VLImageProcessorPil(**{name: value for name, value in SETTINGS.items() if name != "image_processor_type"})
    read = processor([row["images"][0] for row in rows], return_tensors="pt")
    tokens = int(np.prod(read["image_grid_thw"][0].tolist())) // MERGE**2
    shown = f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>"
    ids = torch.tensor([tokenizer.encode(row["problem"].replace("<image>", shown)) for row in rows])
    answers = torch.tensor([tokenizer.encode(row["answer"])[0] for row in rows])
    ids = torch.cat([ids, answers[:, None]], dim=1)
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **read}, answers


def warm_up(model: Any, tokenizer: PreTrainedTokenizerFast, task: Task) -> float:
    """Supervised training until enough of the likeliest answers are right; returns how many are."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99))
    held_out = inputs(tokenizer, task.held_out)
    reached = 0.0
    for step in range(MOST_STEPS):
        given, answers = inputs(tokenizer, task.rows_of_step(step))
        log_probs = model(**given).logits[:, -2:].log_softmax(-1)
        loss = -(log_probs[:, 0].gather(1, answers[:, None]).mean() + log_probs[:, 1, EOS].mean())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 2 == 1 and (reached := accuracy(model, held_out)) >= task.enough:
            break
    return reached


def accuracy(model: Any, rows: tuple[dict[str, Tensor], Tensor]) -> float:
    """The share of pictures whose likeliest answer is right."""
    given, answers = rows
    with torch.no_grad():
        likeliest = model(**given).logits[:, -2:].argmax(-1)
    return float(((likeliest[:, 0] == answers) & (likeliest[:, 1] == EOS)).float().mean())


def make(out: Path, task: Callable[[], Task] | None = None) -> float:
    """Write the model, its tokenizer and its processor's settings to `out`; returns its accuracy. No task: random weights."""
    torch.set_num_threads(1)  # so that the sums of floats, and with them the model, do not depend on the machine's cores
    torch.manual_seed(0)
    model, tokenizer = make_model(), make_tokenizer()
    reached = warm_up(model, tokenizer, task()) if task is not None else 0.0
    with whole_folder(out) as part:
        hide_bars()
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / "preprocessor_config.json").write_text(json.dumps(SETTINGS, indent=2) + "\n")
    return reached


def main() -> None:
    """Make the model unless the folder is there already."""
    tasks = {(): counting, ("--digits",): reading, ("--untrained",): None}
    if len(sys.argv) < 2 or tuple(sys.argv[2:]) not in tasks:
        sys.exit("usage: python tools/model/tiny_vision.py OUT_FOLDER [--digits | --untrained]")
    out = Path(sys.argv[1])
    if (out / "config.json").exists():
        print(f"{out} is already there")
        return
    started = time.monotonic()
    reached = make(out, tasks[tuple(sys.argv[2:])])
    print(f"wrote {out}: {reached:.0%} of its answers are right, made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
