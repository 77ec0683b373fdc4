"""Make a tiny Qwen3-Omni thinker that half knows spoken digits: where examples/hearing/digits.yaml starts from.

Usage: python tools/model/tiny_hearing.py OUT_FOLDER [--untrained]. Random weights, then supervised training on the training
split of examples/hearing/digits.py, stopped when half of its likeliest answers to held-out voices are right. The folder appears
whole or not at all; it takes a few minutes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from megarl.models.registry import architecture_for
from megarl.options.pictures.hearing import Hearing
from megarl.options.pictures.sounds import SoundRules, frames_of, hear_each_alone
from megarl.system.atomic_files import whole_folder
from megarl.system.hidden_bars import hide_bars

SPECIAL = ["<pad>", "<eos>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<|vision_start|>"]
TOKENS = [*SPECIAL, "<unk>", "Which", "digit", "?", *"0123456789"]
PAD, EOS, START, END, AUDIO, VISION_START = range(len(SPECIAL))
EXTRACTOR = {"feature_size": 128, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "chunk_length": 300, "dither": 0.0}
BATCH, MOST_STEPS, LR, ENOUGH = 32, 200, 2e-3, 0.5
ROWS = {"train": 640, "held_out": 100}
Row = dict[str, Any]


def make_model() -> Any:
    """A thinker that splits into two tensor-parallel ranks, two pipeline stages and two expert-parallel ranks, of random
    weights; its tower that sees is never used."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {
        "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "max_position_embeddings": 1024, "rope_parameters": rope,
        "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    audio = {
        "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "d_model": 64, "output_dim": 64,
        "downsample_hidden_size": 16,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64,
        "num_position_embeddings": 4, "deepstack_visual_indexes": [],
    }  # fmt: skip
    tokens = {"audio_token_id": AUDIO, "audio_start_token_id": START, "audio_end_token_id": END}
    tokens |= {"vision_start_token_id": VISION_START, "eos_token_id": EOS, "pad_token_id": PAD}
    config = Qwen3OmniMoeThinkerConfig(text_config=text, audio_config=audio, vision_config=vision, **tokens)
    return Qwen3OmniMoeThinkerForConditionalGeneration(config).float()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words and single digits, and the tokens around sounds."""
    numbers = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")


def rules_of(model: Any) -> SoundRules:
    """Return the rules by which the model takes sounds."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    hearing = architecture_for(config).vision(config)
    assert isinstance(hearing, Hearing)
    extractor = WhisperFeatureExtractor(**EXTRACTOR)
    return SoundRules(extractor.sampling_rate, extractor.hop_length, extractor.n_fft, hearing, extractor)


def rows_of(split: str) -> list[Row]:
    """Rows of examples/hearing/digits.py."""
    file = Path(__file__).parents[2] / "examples" / "hearing" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.spoken_digits(split, ROWS[split]))


def read(rows: list[Row], tokenizer: Any, rules: SoundRules) -> list[tuple[list[int], Tensor, int]]:
    """Ids of each prompt, the frames of its sound, and the id of its answer."""
    found = []
    for row in rows:
        samples = row["audios"][0]["array"]
        shown = f"<|audio_start|>{'<|audio_pad|>' * rules.tokens(len(samples))}<|audio_end|>"
        ids = tokenizer.encode(row["problem"].replace("<audio>", shown))
        found.append((ids, frames_of(samples, rules), tokenizer.encode(row["answer"])[0]))
    return found


def log_probs(model: Any, batch: list[tuple[list[int], Tensor, int]]) -> Tensor:
    """`[B, 2, V]`: of the answer behind each prompt, and of what follows it."""
    lengths = torch.tensor([len(ids) + 1 for ids, _, _ in batch])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor([*ids, answer]) for ids, _, answer in batch], batch_first=True)
    frames = torch.nn.utils.rnn.pad_sequence([frames for _, frames, _ in batch], batch_first=True)
    heard = torch.arange(frames.shape[1]) < torch.tensor([len(frames) for _, frames, _ in batch])[:, None]
    given = {"attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
    given |= {"input_features": frames.mT, "feature_attention_mask": heard.long()}
    logits = model(input_ids=ids, **given).logits
    places = lengths[:, None] - torch.tensor([2, 1])
    chosen: Tensor = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1])).log_softmax(-1)
    return chosen


def warm_up(model: Any, train: list[Any], held_out: list[Any]) -> tuple[float, int]:
    """Supervised training until enough of the likeliest answers are right; returns how many are, and the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99))
    reached = 0.0
    for step in range(MOST_STEPS):
        batch = [train[number % len(train)] for number in range(step * BATCH, (step + 1) * BATCH)]
        found, answers = log_probs(model, batch), torch.tensor([answer for _, _, answer in batch])
        loss = -(found[:, 0].gather(1, answers[:, None]).mean() + found[:, 1, EOS].mean())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 4 and (reached := accuracy(model, held_out)) >= ENOUGH:
            return reached, step + 1
    return reached, MOST_STEPS


def accuracy(model: Any, rows: list[Any]) -> float:
    """The share of sounds whose likeliest answer is right."""
    with torch.no_grad():
        likeliest = log_probs(model, rows).argmax(-1)
    answers = torch.tensor([answer for _, _, answer in rows])
    return float(((likeliest[:, 0] == answers) & (likeliest[:, 1] == EOS)).float().mean())


def make(out: Path, *, trains: bool = True) -> tuple[float, int]:
    """Write the model, its tokenizer and its extractor's settings to `out`; returns its accuracy and the steps it took."""
    torch.set_num_threads(1)  # so that the sums of floats, and with them the model, do not depend on the machine's cores
    torch.manual_seed(0)
    model, tokenizer = make_model(), make_tokenizer()
    hear_each_alone(model)
    reached = (0.0, 0)
    if trains:
        rules = rules_of(model)
        train, held_out = (read(rows_of(split), tokenizer, rules) for split in ("train", "held_out"))
        reached = warm_up(model, train, held_out)
    with whole_folder(out) as part:
        hide_bars()
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        WhisperFeatureExtractor(**EXTRACTOR).save_pretrained(part)
        (part / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "pad_token_id": PAD}) + "\n")
    return reached


def main() -> None:
    """Make the model unless the folder is there already."""
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["--untrained"]):
        sys.exit("usage: python tools/model/tiny_hearing.py OUT_FOLDER [--untrained]")
    out = Path(sys.argv[1])
    if (out / "config.json").exists():
        print(f"{out} is already there")
        return
    started = time.monotonic()
    reached, steps = make(out, trains=not sys.argv[2:])
    took = time.monotonic() - started
    print(f"wrote {out}: {reached:.0%} of its answers are right after {steps} steps, made in {took:.0f} s")


if __name__ == "__main__":
    main()
