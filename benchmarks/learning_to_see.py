"""Does a model that sees learn: counting by GRPO, PPO, REINFORCE++ and after supervised training, and real digits.

    make tiny-vision tiny-digits && python benchmarks/learning_to_see.py --out benchmarks/results/learning_to_see.json

The runs are `megarl train` of examples/vision/count.yaml and digits.yaml with SGLang on two ranks, three seeds each, one after
the other, about three minutes each. Writes the JSON file after every run and leaves out runs that are in it already. Then draws
the curves, beside pictures that the models were shown, and prints the table that is in docs/evidence/learning.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measured_code import code_of
from workload import ROOT, machine, versions

COUNT, DIGITS = "examples/vision/count.yaml", "examples/vision/digits.yaml"
CRITIC = "critic={max_tokens_per_micro_batch: 8192, layout: {dp: 2}, optimizer: {lr: 1e-3}}"
RUNS: dict[str, tuple[str, list[str]]] = {
    "counting, GRPO": (COUNT, []),
    "counting, PPO": (COUNT, ["algorithm.name=ppo", CRITIC]),
    "counting, REINFORCE++": (COUNT, ["algorithm.name=reinforce_plus_plus"]),
    "counting, SFT then GRPO": (COUNT, ["algorithm.kl.coef=0.02"]),
    "digits, GRPO": (DIGITS, []),
}
"""The config of each run, and what is set over it."""
SFT = "counting, SFT then GRPO"


def learn(name: str, seed: int) -> dict[str, Any]:
    """One run: its reward at every step, its held-out accuracies by step, its gates, and the median seconds of a step."""
    config, overrides = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        if name == SFT:
            untrained = Path(folder, "untrained")
            call([sys.executable, str(ROOT / "tools/model/tiny_vision.py"), str(untrained), "--untrained"])
            of_sft = [f"run.folder={folder}", f"run.seed={seed}", f"model.path={untrained}"]
            call([sys.executable, "-m", "megarl", "sft", "examples/vision/count_sft.yaml", *of_sft])
            overrides = [*overrides, f"model.path={folder}/count-sft/model"]
        call(
            [
                sys.executable,
                "-m",
                "megarl",
                "train",
                config,
                f"run.folder={folder}",
                f"run.seed={seed}",
                "run.name=run",
                *overrides,
            ]
        )
        return outcome(name, seed, Path(folder, "run"))


def outcome(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Figures of a run that has ended in `folder`: what `learn` returns."""
    rows = list(map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines()))
    summary = json.loads(Path(folder, "summary.json").read_text())
    accuracy = {str(row["step"]): row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    accuracy |= {"0": summary["eval"]["before"]["accuracy"], str(summary["steps"]): summary["eval"]["after"]["accuracy"]}
    return {
        "name": name,
        "seed": seed,
        "reward": [row["reward/mean"] for row in rows if row.get("step") and "reward/mean" in row],
        "held_out_accuracy": dict(sorted(accuracy.items(), key=lambda item: int(item[0]))),
        "seconds_per_step": summary["seconds_per_step"],
        "gates": summary["gates"],
        "largest_mismatch": max(row["mismatch/log_prob_max"] for row in rows if "mismatch/log_prob_max" in row),
    }


def call(command: list[str]) -> None:
    """Run it in the root of the repository; its output is shown only if it fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-4000:]}")


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Markdown rows: held-out accuracy before and after, of each seed."""
    seeds = sorted({run["seed"] for run in runs})
    lines = ["| run | " + " | ".join(f"seed {seed}" for seed in seeds) + " |", "|---|" + "---|" * len(seeds)]
    for name in RUNS:
        cells = []
        for seed in seeds:
            found = [list(run["held_out_accuracy"].values()) for run in runs if (run["name"], run["seed"]) == (name, seed)]
            cells += [f"{found[0][0]:.1%} → {found[0][-1]:.1%}" if found else "–"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """Two pictures of each task, and the reward of every run: a thin line a seed, a thick one their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10.5, 4), dpi=130)
    grid = figure.add_gridspec(2, 3, width_ratios=(1, 1, 6))
    shown = [("shapes", "count_shapes", {"rows": 2, "seed": 1000000}), ("digits", "digits", {"split": "held_out"})]
    for line, (module, function, arguments) in enumerate(shown):
        rows = iter(getattr(example(module), function)(**arguments))
        for column in range(2):
            row, axes = next(rows), figure.add_subplot(grid[line, column])
            axes.imshow(row["images"][0])
            axes.set(xticks=[], yticks=[])
            axes.set_title(f"{row['problem'].removeprefix('<image>')} {row['answer']}", fontsize=7)
    axes = figure.add_subplot(grid[:, 2])
    for number, name in enumerate(RUNS):
        curves = [run["reward"] for run in runs if run["name"] == name]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=f"C{number}", linewidth=0.5, alpha=0.5)
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        axes.plot(range(1, len(mean) + 1), mean, color=f"C{number}", linewidth=1.6, label=name)
    axes.set(xlabel="step", ylabel="mean reward of the sampled answers", ylim=(0, 1))
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out)


def example(name: str) -> Any:
    """A module of examples/vision."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "vision" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run what is missing, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("learning_to_see.json"), help="JSON file to write")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/vision.png", help="PNG to write")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    runs = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    for seed in range(arguments.seeds):
        for name in RUNS:
            if any((run["name"], run["seed"]) == (name, seed) for run in runs):
                continue
            runs.append(learn(name, seed))
            setup = {"machine": machine(), "versions": versions(), "code": code_of("learning_to_see")}
            arguments.out.write_text(json.dumps(setup | {"runs": runs}) + "\n")
            print(name, seed, runs[-1]["held_out_accuracy"], flush=True)
    draw(runs, arguments.picture)
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
