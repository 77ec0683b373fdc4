"""Does it learn: advantage estimators, policy losses, variants of them and presets on the tiny model, three seeds each.

    make tiny-model && python benchmarks/learning.py --out benchmarks/results/learning.json

The mean reward of the last five steps is compared with a threshold of 0.9; what misses it is written down as such.
Writes the JSON file and the picture of docs/evidence/learning.md, whose tables `make docs` writes. Needs matplotlib.
Runs that the file has already are kept, each with its date: to repeat all, name a file that is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from measured_code import code_of
from workload import ROOT, machine, versions

MODEL = str(ROOT / "models/tiny-arithmetic")
THRESHOLD, LAST_STEPS = 0.9, 5
LR = {"estimator": 5e-4, "loss": 3e-4, "preset": 5e-4}
"""Losses make two updates a step."""
CRITIC: dict[str, Any] = {"critic": {"max_tokens_per_micro_batch": 4096, "threads_per_rank": 1, "optimizer": {"lr": 1e-3}}}
TWICE: dict[str, Any] = {
    "rollout": {"episode": {"kind": f"{Path(__file__).with_name('learning_twice.py')}:twice"}, "max_new_tokens": 16},
    "rewards": [{"name": "environment"}],
}
"""Every sum is asked twice: two turns, each with a reward."""
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {
        "algorithm": {"advantage_normalisation": "none"},
        **CRITIC,
    },
    "reinforce": {},
    "reinforce_moving_baseline": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
    "grpo": {},
    "grpo_process": {"reward_model": {"path": MODEL, "per_step": True, "weight": 0.0}},
    "dr_grpo": {},
    "rloo": {},
    "remax": {},
    "opo": {},
    "gpg": {},
    "gdpo": {
        "rewards": [
            {"name": "exact_number", "weight": 0.5},
            {"name": "edit_distance", "weight": 0.5},
        ]
    },
    "pass_at_k": {"algorithm": {"advantage_args": {"k": 4}}},
    "optimal_token_baseline": {},
    "turn_rloo": {"algorithm": {"gamma": 0.5}, **TWICE},
    "gigpo": TWICE,
}
LOSSES: dict[str, dict[str, Any]] = {
    "clip": {},
    "dual_clip": {},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 0.2, "clip_high": 0.2},
    "gmpo": {"aggregation": "seq_mean_token_mean"},
    "sapo": {"aggregation": "seq_mean_token_mean"},
    "reinforce": {},
    "kl_penalty": {"old_policy_kl": {"coef": 0.1}},
    "clip_cov": {"policy_loss_args": {"share": 0.02, "low": 0.1}},
    "kl_cov": {"policy_loss_args": {"share": 0.02, "coef": 0.1}},
    "top share of entropies": {"policy_loss": "clip", "entropy": {"top_share": 0.2}},
    "entropy target": {"policy_loss": "clip", "entropy": {"target": 0.5}},
}
"""By name of a policy loss, or of a variant of one that it names, what is set in `algorithm`."""
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "reinforce_plus_plus": {},
    "dapo": {},
    "dr_grpo": {},
    "gspo": {},
    "gmpo": {},
    "sapo": {},
    "cispo": {},
    "rloo": {},
    "remax": {},
    "opo": {},
    "gpg": {},
    "online_dpo": {},
    "ppo": CRITIC,
    "vapo": {"critic": {**CRITIC["critic"], "warmup_steps": 5}},
}
"""As they are; `opd` is in distillation.py."""
ROWS = {"estimator": ESTIMATORS, "loss": LOSSES, "preset": PRESETS}


def settings(kind: str, name: str, seed: int, steps: int, folder: str) -> dict[str, Any]:
    """The run of one row and seed: estimators under `clip` and presets with one update a step, losses under `grpo` with two."""
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    source = {"source": "reasoning_gym", "name": "basic_arithmetic", "limit": 1000}
    source["args"] = task | {"allow_parentheses": False, "allow_negation": False}
    algorithm: dict[str, Any] = {"kl": {"coef": 0.0}, "aggregation": "token_mean"}
    if kind == "estimator":
        algorithm |= {"advantage": name, **ESTIMATORS[name].get("algorithm", {})}
    elif kind == "preset":
        algorithm = {"name": name}
    else:
        algorithm |= {"advantage": "grpo", "policy_loss": name, "mini_batches": 2, **LOSSES[name]}
    more = {} if kind == "loss" else ROWS[kind][name]
    rollout = {"engine": "embedded", "prompts_per_step": 32, "samples_per_prompt": 8, "max_new_tokens": 4}
    tree = {
        "run": {"name": f"{kind}-{name}-{seed}", "folder": folder, "steps": steps, "seed": seed, "log_samples": 0},
        "model": {"path": MODEL, "dtype": "float32"},
        "policy": {
            "max_tokens_per_micro_batch": 4096, "share_prefix": True, "threads_per_rank": 1,
            "optimizer": {"lr": LR[kind], "warmup_steps": 5, "schedule": "cosine", "betas": [0.9, 0.99]},
        },
        "algorithm": algorithm,
        "data": {"train": source, "chat_template": "never", "max_prompt_tokens": 8},
        "rollout": rollout,
        "rewards": [{"name": "exact_number"}],
    }  # fmt: skip
    changed = {section: fields for section, fields in more.items() if section != "algorithm"}
    return tree | changed | {"rollout": rollout | more.get("rollout", {})}


def learn(row: tuple[str, str, int], steps: int) -> dict[str, Any]:
    """One run in this process: its reward at every step, and its seconds."""
    import ray

    from megarl.config import parse_config
    from megarl.observe import read_metrics
    from megarl.trainers.rl.train import train

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=256 * 2**20, log_to_driver=False)
    kind, name, seed = row
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        config = parse_config(settings(kind, name, seed, steps, folder))
        with contextlib.redirect_stdout(io.StringIO()):
            train(config)
        curve = [line["reward/mean"] for line in read_metrics(Path(config.run_folder) / "metrics.jsonl") if line["step"]]
    date = datetime.now(UTC).date().isoformat()
    return {"kind": kind, "name": name, "seed": seed, "date": date, "seconds": time.monotonic() - started, "reward": curve}


def table(runs: list[dict[str, Any]], kind: str) -> list[str]:
    """Markdown rows: reward of the last steps per seed, first step above the threshold on the mean curve, and the verdict."""
    lines = [f"| {kind} | seed 0 | seed 1 | seed 2 | mean curve first above {THRESHOLD} at step | reaches {THRESHOLD} |"]
    lines.append("|---|---|---|---|---|---|")
    for name in dict.fromkeys(run["name"] for run in runs if run["kind"] == kind):
        curves = [
            run["reward"] for run in sorted(runs, key=lambda run: run["seed"]) if (run["kind"], run["name"]) == (kind, name)
        ]
        ends = [sum(curve[-LAST_STEPS:]) / LAST_STEPS for curve in curves]
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        first = next((str(step) for step, value in enumerate(mean, 1) if value >= THRESHOLD), "never")
        reached = sum(end >= THRESHOLD for end in ends)
        verdict = "yes" if reached == len(ends) else f"{reached} of {len(ends)} seeds"
        figures = [*(f"{end:.3f}" for end in ends), *["–"] * (3 - len(ends))]
        lines.append(f"| `{name}` | {' | '.join(figures)} | {first} | {verdict} |")
    return lines


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """Mean curves, kind beside kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(ROWS), figsize=(16, 4), dpi=130, sharey=True)
    for axes, kind in zip(panels, ROWS, strict=True):
        for name in dict.fromkeys(run["name"] for run in runs if run["kind"] == kind):
            curves = [run["reward"] for run in runs if (run["kind"], run["name"]) == (kind, name)]
            mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
            axes.plot(range(1, len(mean) + 1), mean, linewidth=1.2, label=name)
        axes.axhline(THRESHOLD, color="black", linewidth=0.6, linestyle="--")
        axes.set(xlabel="step", title=f"by {kind}")
        axes.legend(fontsize=6, ncols=2)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean reward, mean of the seeds")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main() -> None:
    """Run every row and seed that the file lacks, two at a time, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("learning.json"), help="JSON file to write")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    order = [(kind, name, seed) for kind, names in ROWS.items() for name in names for seed in range(arguments.seeds)]
    known = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    runs = {(run["kind"], run["name"], run["seed"]): run for run in known}
    rows = sorted((row for row in order if row not in runs), key=lambda row: row[2])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    setup = {"machine": machine(), "versions": versions(), "code": code_of("learning")}
    setup |= {"steps": arguments.steps, "threshold": THRESHOLD}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for row, run in zip(rows, pool.map(learn, rows, [arguments.steps] * len(rows)), strict=True):
            runs[row] = run
            arguments.out.write_text(json.dumps(setup | {"runs": [runs[row] for row in order if row in runs]}) + "\n")
    found = [runs[row] for row in order if row in runs]
    draw(found, ROOT / "docs/images/learning.png")
    print("\n\n".join("\n".join(table(found, kind)) for kind in ROWS))


if __name__ == "__main__":
    main()
