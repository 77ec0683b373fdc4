"""GRPO steps of TRL with Hugging Face generation, timed: the baseline that benchmarks/against_trl.py compares with.

Runs in TRL's own environment and imports nothing of megarl. Prompts come from a JSONL file, the result goes to a JSON file.
"""

import argparse
import json
import os
import platform
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

VERSIONS = ("trl", "transformers", "torch", "accelerate", "datasets")


def completion_length(completions: list[Any], **_: Any) -> list[float]:
    """Characters per completion: differs within nearly every group, so that no group's advantages, and work, vanish."""
    return [float(len(completion[0]["content"])) for completion in completions]


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes how long each round of generation took; the arithmetic is untouched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generate_s: list[float] = []
        self.prompt_tokens: list[int] = []
        self.response_tokens: list[int] = []

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        completion_ids, log_probs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.generate_s.append(time.perf_counter() - started)
        self.prompt_tokens.append(sum(map(len, prompt_ids)))
        self.response_tokens.append(sum(map(len, completion_ids)))
        return completion_ids, log_probs


class StepClock(TrainerCallback):
    """Wall seconds from the start of a step, before its generation, to the end of its optimizer update."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.step_s.append(time.perf_counter() - self._started)


def settings(args: argparse.Namespace, folder: Path) -> GRPOConfig:
    """TRL's fastest arrangement of this work on a CPU: no reference model and no recomputation."""
    samples = args.prompts * args.samples
    if samples % args.micro_batch:
        sys.exit(f"--micro-batch must divide the {samples} samples of a step; {args.micro_batch} does not")
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        fp16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=samples // args.micro_batch,
        num_generations=args.samples,
        max_completion_length=args.new_tokens,
        generation_kwargs={"min_new_tokens": args.new_tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=args.seed,
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train for `args.steps` steps and return the figures of each, first one included."""
    rows = [json.loads(line) for line in args.prompts_file.read_text().splitlines()]
    if len(rows) < args.prompts * args.steps:
        sys.exit(f"{args.prompts_file} has {len(rows)} prompts; {args.steps} steps of {args.prompts} need more")
    clock = StepClock()
    trainer = TimedTrainer(
        model=str(args.model),
        reward_funcs=completion_length,
        args=settings(args, args.out.parent / "trl"),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[clock],
    )
    trainer.train()
    samples = args.prompts * args.samples
    steps = [
        {
            "step_s": step_s,
            "generate_s": generate_s,
            "train_s": step_s - generate_s,
            "samples": samples,
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
        }
        for step_s, generate_s, prompt_tokens, response_tokens in zip(
            clock.step_s, trainer.generate_s, trainer.prompt_tokens, trainer.response_tokens, strict=True
        )
    ]
    short = [step for step in steps if step["response_tokens"] != samples * args.new_tokens]
    if short:
        sys.exit(f"not every response has {args.new_tokens} tokens, so the work is not what it is compared with: {short[0]}")
    return {"steps": steps, "settings": reported_settings(trainer), "versions": {name: version(name) for name in VERSIONS}}


def reported_settings(trainer: GRPOTrainer) -> dict[str, Any]:
    """What was in force, read back from where it acts."""
    return {
        "dtype": str(next(trainer.model.parameters()).dtype),
        "micro_batch": trainer.args.per_device_train_batch_size,
        "samples_per_prompt": trainer.num_generations,
        "new_tokens": trainer.max_completion_length,
        "gradient_checkpointing": trainer.args.gradient_checkpointing,
        "loss_type": trainer.loss_type,
        "kl_coef": trainer.beta,
        "optimizer": str(trainer.args.optim),
        "threads": torch.get_num_threads(),
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
        "python": platform.python_version(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts_file", type=Path, help="JSONL; `prompt` of each row is a list of chat messages")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--new-tokens", type=int, default=16, help="exact length of every response")
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences per forward and backward pass")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.write_text(json.dumps(measure(args), indent=2) + "\n")


if __name__ == "__main__":
    main()
