"""Draw the reward over the steps of runs that repeat each other under other seeds: one thin line a run, one thick mean.

    python benchmarks/learning_curve.py OUT.png runs/quickstart runs/quickstart-seed1 …

Needs matplotlib (pip install matplotlib).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.observe import read_metrics


def main() -> None:
    """Read every run's metrics.jsonl and write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="PNG to write")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7, 3.2), dpi=150)
    curves = []
    for run in arguments.runs:
        rows = [row for row in read_metrics(run / "metrics.jsonl") if "reward/mean" in row]
        curves.append({row["step"]: row["reward/mean"] for row in rows})
        axes.plot(list(curves[-1]), list(curves[-1].values()), linewidth=1, alpha=0.5, label=run.name)
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    if len(curves) > 1:
        axes.plot(steps, [sum(c[s] for c in curves) / len(curves) for s in steps], color="black", linewidth=2, label="mean")
    axes.set(xlabel="step", ylabel="mean reward of the sampled answers", ylim=(0, 1))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out)


if __name__ == "__main__":
    main()
