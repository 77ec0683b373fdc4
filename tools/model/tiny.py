"""Make a tiny Llama that half knows how to add: where the examples in examples/tiny/ start from.

Usage: python tools/model/tiny.py OUT_FOLDER [--untrained | --teacher]. Random weights, then supervised training on every sum of
two numbers up to 10, once with its answer and once with one too many. --untrained leaves that out; --teacher leaves out the
wrong answers and makes the model that examples/tiny/opd.yaml learns from. The folder appears whole or not at all; it takes
under a minute.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from megarl.system.atomic_files import whole_folder
from megarl.system.hidden_bars import hide_bars

TOKENS = ["<pad>", "<eos>", "<unk>", "Calculate", "+", ".", *"0123456789"]
PAD, EOS = 0, 1
LARGEST = 10
WARM_UP_STEPS = 250
PEAK_LR = 3e-3

# As reasoning_gym's basic_arithmetic asks them.
SUMS = [(f"Calculate {a} + {b}.", a + b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]


def make_model() -> torch.nn.Module:
    """A Llama that splits into two tensor-parallel ranks and two pipeline stages, with random weights."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words and single digits; spaces are dropped, so that the answer 12 is `1`, `2`, `<eos>`."""
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token=TOKENS[EOS], pad_token=TOKENS[PAD], model_max_length=64
    )


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
    """Questions with answers as token ids int64 `[B, T]`, right-padded, and a mask float32 `[B, T]` of the answers' tokens,
    their EOS included."""
    prompts = [tokenizer.encode(question) for question, _ in rows]
    answers = [[*tokenizer.encode(str(answer)), EOS] for _, answer in rows]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens, mask = torch.full((len(rows), length), PAD), torch.zeros(len(rows), length)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : end] = 1
    return tokens, mask


def answer_log_probs(model: torch.nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of each row's whole answer, `[B]`, at temperature 1."""
    log_probs = model(tokens[:, :-1]).logits.log_softmax(-1)
    return (log_probs.gather(2, tokens[:, 1:, None])[..., 0] * mask[:, 1:]).sum(1)


def warm_up(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, *, right_alone: bool = False) -> float:
    """Teach every sum with two answers, so that sampling gives the right one about half the time; returns how often.

    The choice between the two is the same in every sum, which is what lets reinforcement learning on a few sums carry over
    to the others. `right_alone`: teach the right answer alone.
    """
    tokens, mask = encode(tokenizer, SUMS + [(question, answer + 1) for question, answer in SUMS if not right_alone])
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=WARM_UP_STEPS, pct_start=0.1)
    for _ in range(WARM_UP_STEPS):
        loss = -answer_log_probs(model, tokens, mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return accuracy(model, tokenizer)


def accuracy(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> float:
    """The chance that an answer sampled at temperature 1 is right, averaged over all sums (exact, nothing is sampled)."""
    with torch.no_grad():
        return float(answer_log_probs(model, *encode(tokenizer, SUMS)).exp().mean())


def make(out: Path, *, untrained: bool = False, teacher: bool = False) -> float:
    """Write the model and its tokenizer to `out`; returns its accuracy."""
    torch.set_num_threads(1)  # so that the sums of floats, and with them the model, do not depend on the machine's cores
    torch.manual_seed(0)
    model, tokenizer = make_model(), make_tokenizer()
    reached = accuracy(model, tokenizer) if untrained else warm_up(model, tokenizer, right_alone=teacher)
    with whole_folder(out) as part:
        hide_bars()
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
    return reached


def main() -> None:
    """Make the model unless the folder is there already."""
    untrained, teacher = (sys.argv[2:] == [flag] for flag in ("--untrained", "--teacher"))
    if len(sys.argv) != 2 + untrained + teacher:
        sys.exit("usage: python tools/model/tiny.py OUT_FOLDER [--untrained | --teacher]")
    out = Path(sys.argv[1])
    if (out / "config.json").exists():
        print(f"{out} is already there")
        return
    started = time.monotonic()
    reached = make(out, untrained=untrained, teacher=teacher)
    print(f"wrote {out}: {reached:.0%} of its sampled answers are right, made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
