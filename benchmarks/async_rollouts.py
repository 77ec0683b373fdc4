"""Schedules against each other on the tiny example: how busy the trainer is, how long a step takes, and what is learned.

    make tiny-model && python benchmarks/async_rollouts.py --out benchmarks/results/async_rollouts.json
    python benchmarks/async_rollouts.py --lending --steps 8 --out benchmarks/results/lent_engines.json

With `--lending`: examples/recipes/lent_engines.yaml without and with its lent engine, in turns, by engines whose steps take a
fixed time (paced_engine.py). Else every run is one of examples/tiny/grpo*.yaml with another seed, and one core for each side;
generation is the faster side there.
Figures of time leave out the first two steps. Prints the table of docs/rollouts.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from measured_code import code_of
from workload import ROOT, machine, versions

EXAMPLES = {"sync": "tiny/grpo", "one_step": "tiny/grpo_one_step", "async": "tiny/grpo_async"}
PACED = [f"rollout.engine={ROOT}/benchmarks/paced_engine.py:PacedEngine", "rollout.max_new_tokens=32"]
LENDING = {"alone": [*PACED, "rollout.schedule.lent_engines=0"], "lent": PACED}
"""Modes of `--lending`, and their overrides."""
OF_LENDING = ("lent_tokens", "lent_s", "lending_s", "lent_share")
FIRST, LAST = 2, 5
"""Steps left out of times, and steps that the final reward is the mean of."""


def run(mode: str, seed: int, overrides: list[str], folder: str) -> dict[str, Any]:
    """One run, and what its metrics say."""
    from megarl.config import load_config
    from megarl.observe import read_metrics
    from megarl.trainers.rl.train import train

    overrides = [*overrides, f"run.seed={seed}", f"run.name={mode}-{seed}", f"run.folder={folder}", "run.log_samples=0"]
    example = EXAMPLES.get(mode, "recipes/lent_engines")
    config = load_config(ROOT / f"examples/{example}.yaml", [*overrides, *LENDING.get(mode, [])])
    with contextlib.redirect_stdout(io.StringIO()):
        summary = train(config)
    rows = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if row["step"]]
    timed = rows[FIRST:]

    def of_time(name: str) -> float:
        return sum(row.get(name, 0.0) for row in timed) / sum(row["time/step_s"] for row in timed)

    return {
        "mode": mode,
        "seed": seed,
        "reward_first": rows[0]["reward/mean"],
        "reward_last": mean(row["reward/mean"] for row in rows[-LAST:]),
        "accuracy": (summary["eval"]["after"] or {}).get("accuracy", 0.0),
        "step_s": mean(row["time/step_s"] for row in timed),
        "trainer_busy": of_time("time/log_probs_s") + of_time("time/update_s") + of_time("time/sync_s"),
        "training": of_time("time/log_probs_s") + of_time("time/update_s"),
        "waiting": of_time("time/generate_s"),
        "sync": of_time("time/sync_s"),
        "staleness": mean(row["staleness/mean"] for row in timed),
        "staleness_max": max(row["staleness/max"] for row in rows),
        "requeued": sum(row["rollout/requeued"] for row in rows),
        "mismatch_k3": mean(row["mismatch/k3"] for row in timed),
        "samples_per_s": sum(row["rollout/samples"] for row in timed) / sum(row["time/step_s"] for row in timed),
        **{name: mean(row.get(f"rollout/{name}", 0.0) for row in timed) for name in OF_LENDING},
    }


def table(runs: list[dict[str, Any]]) -> str:
    """The means over seeds, one line per schedule."""
    lines = [
        "| mode | seconds per step | trainer busy | of it training | waiting for responses | staleness (mean, max) "
        "| reward of the last 5 steps, by seed | accuracy after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mode in EXAMPLES:
        of_mode = [one for one in runs if one["mode"] == mode]
        if not of_mode:
            continue
        m = {name: mean(one[name] for one in of_mode) for name in of_mode[0] if name != "mode"}
        rewards = ", ".join(f"{one['reward_last']:.3f}" for one in of_mode)
        lines.append(
            f"| `{mode}` | {m['step_s']:.2f} | {m['trainer_busy']:.0%} | {m['training']:.0%} | {m['waiting']:.0%} | "
            f"{m['staleness']:.2f}, {max(one['staleness_max'] for one in of_mode):.0f} | {rewards} | {m['accuracy']:.0%} |"
        )
    return "\n".join(lines)


def lending_table(runs: list[dict[str, Any]]) -> str:
    """A line for each pair of runs, which were made one after the other."""
    lines = [
        "| seed | samples/s with lending over without | waiting without | waiting with | share of waits lent | reward |",
        "|---|---|---|---|---|---|",
    ]
    for alone, lent in zip(runs[::2], runs[1::2], strict=False):
        lines.append(
            f"| {lent['seed']} | {lent['samples_per_s'] / alone['samples_per_s']:.2f} | {alone['waiting']:.0%} | "
            f"{lent['waiting']:.0%} | {lent['lent_share']:.0%} | {alone['reward_last']:.3f}, {lent['reward_last']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=1, help="passes over a step's samples: more make training slower")
    parser.add_argument("--modes", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--lending", action="store_true")
    options = parser.parse_args()
    modes = list(LENDING) if options.lending else options.modes
    overrides = [f"run.steps={options.steps}", f"algorithm.epochs={options.epochs}", "policy.threads_per_rank=1"]
    overrides += ["rollout.threads=1"]  # the same core for each side in every mode
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for mode in modes:  # in turns, so that whatever else the machine does hits all alike
                runs.append(run(mode, seed, overrides, folder))
                print(json.dumps(runs[-1]), flush=True)
    print((lending_table if options.lending else table)(runs))
    if options.out:
        setup = {"overrides": overrides, "machine": machine(), "versions": versions(), "code": code_of("async_rollouts")}
        result = setup | {"load": os.getloadavg(), "runs": runs}
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
