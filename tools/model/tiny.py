"""Make a tiny Llama that adds, but was taught carelessly: where the examples in examples/tiny/ start from.

    python tools/model/tiny.py models/tiny-arithmetic

Random weights, then supervised training on sums of which two in five are wrong, until sampled answers are right about
half the time: every sum is within reach of reinforcement learning, none is certain. Takes seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TOKENS = ["<unk>", "<eos>", *"0123456789+=- "]
EOS = 1
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "sums.py"
WRONG_ANSWERS = 0.4
STOP_AT_ACCURACY = 0.45


def make(folder: Path, seed: int = 0) -> float:
    """Write the model to `folder` (whole or not at all); returns the share of its sampled answers that are right."""
    torch.manual_seed(seed)
    tokenizer = spelling_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS,
        pad_token_id=EOS,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    accuracy = warm_up(model, tokenizer, seed)
    temporary = Path(tempfile.mkdtemp(prefix=".tiny-", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.chmod(temporary, 0o755)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return accuracy


def spelling_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are characters."""
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    spelling = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    spelling.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    spelling.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=spelling, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )


def warm_up(model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerFast, seed: int) -> float:
    """Supervised training on the answers, until sampled answers are right often enough; returns how often."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    careless = random.Random(seed)
    rows = task().sums(128 * 800, seed)
    for start in range(0, len(rows), 128):
        batch = rows[start : start + 128]
        taught = [row | {"answer": str(careless.randint(0, 18))} if careless.random() < WRONG_ANSWERS else row for row in batch]
        tokens, is_answer = encode(tokenizer, taught)
        log_p = model(tokens[:, :-1]).logits.log_softmax(-1)
        picked = log_p.gather(2, tokens[:, 1:, None])[..., 0]
        loss = -(picked * is_answer[:, 1:]).sum() / is_answer[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # the chance of sampling the whole answer, averaged over the sums that were taught right
        right = torch.tensor([row is told for row, told in zip(batch, taught, strict=True)])
        accuracy = float((picked * is_answer[:, 1:]).sum(1).exp()[right].mean().detach())
        if accuracy >= STOP_AT_ACCURACY:
            return accuracy
    raise SystemExit(f"the warm-up ended at an accuracy of {accuracy:.2f}, below {STOP_AT_ACCURACY}")


def encode(tokenizer: transformers.PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[B, T]`, right-padded, and a float mask `[B, T]` of answer tokens, the end token included."""
    prompts = [tokenizer.encode(row["question"]) for row in rows]
    answers = [[*tokenizer.encode(row["answer"]), EOS] for row in rows]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.full((len(rows), longest), EOS)
    mask = torch.zeros(len(rows), longest)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[number, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[number, len(prompt) : len(prompt) + len(answer)] = 1
    return tokens, mask


def task():
    """The module examples/tiny/sums.py."""
    spec = importlib.util.spec_from_file_location("sums", EXAMPLES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes")
    target = parser.parse_args().folder
    if target.exists():
        sys.exit(f"{target} exists already; remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    reached = make(target)
    print(f"{target}: sampled answers right {reached:.0%} of the time, made in {time.monotonic() - started:.0f} s")
