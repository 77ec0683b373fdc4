"""Does a student reach its teacher: every form of distillation on the tiny model, three seeds each.

    make tiny-model tiny-teacher && python benchmarks/distillation.py --out benchmarks/results/distillation.json

The student answers half of the sums right, the teacher all of them. The mean reward of the last five steps is compared with the
chance that the teacher's sampled answer is right: a student must come within three points of it. Writes the JSON file, and
prints the table of docs/evidence/learning.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from measured_code import code_of
from workload import ROOT, machine, versions

STUDENT, TEACHER = (str(ROOT / "models" / name) for name in ("tiny-arithmetic", "tiny-teacher"))
MARGIN, LAST_STEPS = 0.03, 5
FORMS: dict[str, dict[str, Any]] = {
    "advantage, γ = 0": {"name": "opd"},
    "advantage, γ = 1": {"name": "opd", "distillation": {"gamma": 1.0}},
    "advantage beside GRPO": {"name": "grpo", "kl": {"coef": 0.0}, "distillation": {"coef": 0.5}},
    "reverse KL, teacher's top 4": {"name": "opd", "distillation": {"apply_to": "loss", "top_k": 4}},
    "reverse KL, policy's top 4": {"name": "opd", "distillation": {"apply_to": "loss", "top_k": 4, "top_k_of": "policy"}},
    "forward KL, teacher's top 4": {
        "name": "opd", "distillation": {"apply_to": "loss", "divergence": "forward_kl", "top_k": 4},
    },
    "JSD(0.5), teacher's top 4": {"name": "opd", "distillation": {"apply_to": "loss", "divergence": "jsd", "top_k": 4}},
}  # fmt: skip


def settings(form: str, seed: int, steps: int, folder: str) -> dict[str, Any]:
    """The run of one form and seed."""
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    source = {"source": "reasoning_gym", "name": "basic_arithmetic", "limit": 1000}
    source["args"] = task | {"allow_parentheses": False, "allow_negation": False}
    return {
        "run": {"name": "distillation", "folder": folder, "steps": steps, "seed": seed, "log_samples": 0},
        "model": {"path": STUDENT, "dtype": "float32"},
        "policy": {
            "max_tokens_per_micro_batch": 4096, "share_prefix": True, "threads_per_rank": 1,
            "optimizer": {"lr": 5e-4, "warmup_steps": 5, "schedule": "cosine", "betas": [0.9, 0.99]},
        },
        "teacher": {"path": TEACHER},
        "algorithm": FORMS[form],
        "data": {"train": source, "chat_template": "never", "max_prompt_tokens": 8},
        "rollout": {"engine": "embedded", "prompts_per_step": 96, "samples_per_prompt": 8, "max_new_tokens": 4},
        "rewards": [{"name": "exact_number"}],
    }  # fmt: skip


def learn(row: tuple[str, int], steps: int) -> dict[str, Any]:
    """One run in this process: its reward and its distance to the teacher at every step, and its seconds."""
    import ray

    from megarl.config import parse_config
    from megarl.observe import read_metrics
    from megarl.trainers.rl.train import train

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=256 * 2**20, log_to_driver=False)
    form, seed = row
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        config = parse_config(settings(form, seed, steps, folder))
        with contextlib.redirect_stdout(io.StringIO()):
            train(config)
        lines = [line for line in read_metrics(Path(config.run_folder) / "metrics.jsonl") if line["step"]]
    curves = {name: [line[name] for line in lines] for name in ("reward/mean", "distillation/reverse_kl", "policy/entropy")}
    return {"form": form, "seed": seed, "seconds": time.monotonic() - started, **curves}


def accuracy(folder: str) -> float:
    """The chance that an answer sampled from the model in `folder` is right, over all sums (tools/model/tiny.py)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.spec_from_file_location("tiny", ROOT / "tools/model/tiny.py")
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    return float(tiny.accuracy(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)))


def table(runs: list[dict[str, Any]], teacher: float) -> list[str]:
    """Markdown rows: reward of the last steps per seed, its reverse KL, and whether all seeds come within the margin."""
    seeds = sorted({run["seed"] for run in runs})
    heads = [f"seed {seed}" for seed in seeds]
    lines = [f"| form | {' | '.join(heads)} | nats/token from the teacher, first and last | within {100 * MARGIN:.0f} points |"]
    lines.append("|---" * (len(seeds) + 3) + "|")
    for form in dict.fromkeys(run["form"] for run in runs):
        of_form = sorted((run for run in runs if run["form"] == form), key=lambda run: run["seed"])
        ends = [sum(run["reward/mean"][-LAST_STEPS:]) / LAST_STEPS for run in of_form]
        first, last = (sum(run["distillation/reverse_kl"][at] for run in of_form) / len(of_form) for at in (0, -1))
        near = sum(end >= teacher - MARGIN for end in ends)
        verdict = "yes" if near == len(ends) else f"{near} of {len(ends)} seeds"
        lines.append(f"| {form} | {' | '.join(f'{end:.3f}' for end in ends)} | {first:.3f} → {last:.3f} | {verdict} |")
    return lines


def main() -> None:
    """Run every form and seed, two at a time, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("distillation.json"), help="JSON file to write")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    rows = [(form, seed) for form in FORMS for seed in range(arguments.seeds)]
    models = {"student": accuracy(STUDENT), "teacher": accuracy(TEACHER)}
    setup = {"machine": machine(), "versions": versions(), "code": code_of("distillation"), "steps": arguments.steps}
    setup |= {"margin": MARGIN, "accuracy": models}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(learn, rows, [arguments.steps] * len(rows)))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(setup | {"runs": runs}) + "\n")
    print(f"student {models['student']:.3f}, teacher {models['teacher']:.3f}")
    print("\n".join(table(runs, models["teacher"])))


if __name__ == "__main__":
    main()
