"""How far engines of each precision are from the trainer: log-probs of what they sampled, on a real model.

    python benchmarks/engine_precisions.py --out benchmarks/results/engine_precisions.json

The embedded engine samples with what each precision makes of weights, and of keys and values; transformers in float32 says the
log-probs of the same tokens with the unrounded weights, as a trainer would. Kernels of a GPU that round activations too add
to it. The same prompts, seeds and lengths for each. `mean_abs`, `p99` and `max` are of |engine - trainer| in nats; `k3` is the
mean of exp(d) - 1 - d with d = trainer - engine, the estimate of the KL that runs log as `mismatch/k3`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from measured_code import code_of
from transformers import AutoModelForCausalLM
from workload import machine

from megarl import cli
from megarl.data.tokenize import load_tokenizer
from megarl.options.fp8_cache.embedded import round_keys_and_values
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams

PRECISIONS: dict[str, tuple[str, str | None, bool]] = {
    "float32": ("float32", None, False),
    "bfloat16": ("bfloat16", None, False),
    "keys and values in FP8": ("float32", None, True),
    "weights in FP8 blocks": ("float32", "fp8-block", False),
    "weights in MXFP8": ("float32", "mxfp8", False),
    "weights in FP8 blocks, keys and values in FP8": ("float32", "fp8-block", True),
    "the same in bfloat16": ("bfloat16", "fp8-block", True),
}
"""Name -> dtype of the engine, format of its weights, and whether keys and values are in FP8."""


def prompts_of(model: str, count: int) -> list[list[int]]:
    """Sums as questions of a conversation, in token ids."""
    tokenizer = load_tokenizer(model)
    rows = reasoning_gym.create_dataset("chain_sum", size=count, seed=7)
    messages = ([{"role": "user", "content": row["question"]}] for row in rows)
    texts = (tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in messages)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def in_format(model: str, format: str, folder: Path) -> Path:
    """The model's folder with weights in `format`, written by `megarl convert`."""
    checkpoint, out = folder / "checkpoint", folder / format
    if not checkpoint.exists():
        assert cli.main(["convert", "import", model, str(checkpoint)]) == 0
    if not out.exists():
        assert cli.main(["convert", "export", str(checkpoint), str(out), "--dtype", format]) == 0
    return out


@torch.no_grad()
def differences(trainer: Any, prompt: list[int], group: list[Generation]) -> torch.Tensor:
    """Trainer's log-probs less the engine's, float64, of all tokens of the responses to a prompt."""
    longest = max(len(one.response_ids) for one in group)
    ids = torch.tensor([[*prompt, *one.response_ids, *[0] * (longest - len(one.response_ids))] for one in group])
    log_probs = trainer(ids).logits[:, len(prompt) - 1 : -1].double().log_softmax(-1)
    expected = log_probs.gather(2, ids[:, len(prompt) :, None])[..., 0]
    found = [row[: len(one.log_probs)] - torch.tensor(one.log_probs) for row, one in zip(expected, group, strict=True)]
    return torch.cat(found)


def measure(model: str, trainer: Any, prompts: list[list[int]], n: int, tokens: int, name: str, folder: Path) -> dict[str, Any]:
    """The figures of one precision."""
    dtype, format, few = PRECISIONS[name]
    served = in_format(model, format, folder) if format is not None else None
    changes = [round_keys_and_values] if few else []
    engine = EmbeddedEngine(model, dtype=dtype, served_path=served, changes=changes, initial_version=0)
    began = time.perf_counter()
    groups = asyncio.run(engine.generate(EngineRequest(prompts, SamplingParams(max_new_tokens=tokens), n=n)))
    sampled_s = time.perf_counter() - began
    apart = torch.cat([differences(trainer, prompt, group) for prompt, group in zip(prompts, groups, strict=True)])
    return {
        "tokens": len(apart),
        "mean_abs": float(apart.abs().mean()),
        "p99": float(apart.abs().quantile(0.99)),
        "max": float(apart.abs().max()),
        "k3": float((apart.exp() - 1 - apart).mean()),
        "sampled_s": sampled_s,
    }


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=32, help="prompts (default: 32)")
    parser.add_argument("--n", type=int, default=4, help="responses to each (default: 4)")
    parser.add_argument("--tokens", type=int, default=48, help="longest response (default: 48)")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS), help="default: all")
    parser.add_argument("--out", required=True, help="JSON file to write")
    arguments = parser.parse_args()
    prompts = prompts_of(arguments.model, arguments.prompts)
    trainer = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as temporary:
        sizes = (arguments.n, arguments.tokens)
        rows = {
            name: measure(arguments.model, trainer, prompts, *sizes, name, Path(temporary)) for name in arguments.precisions
        }
    figures = {
        "machine": machine(),
        "code": code_of("engine_precisions"),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "setup": {
            "model": Path(arguments.model).name,
            "prompts": arguments.prompts,
            "n": arguments.n,
            "max_new_tokens": arguments.tokens,
        },
        "precisions": rows,
    }
    Path(arguments.out).write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
