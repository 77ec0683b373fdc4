"""Curves of runs as a PNG for a paper; of runs that repeat each other the mean, and a band from lowest to highest seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.errors import ConfigError, DataError, nearest, written_out
from megarl.observe.run_record import RunRecord, metric_names, repetitions

INCHES = (3.5, 2.4)
"""A column of a two-column page."""
DPI = 300


def plot(runs: Sequence[RunRecord], metric: str, file: Path) -> None:
    """Draw `metric` over the steps of `runs`.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: no run has such a metric.
    """
    known = sorted(metric_names(runs))
    if metric not in known:
        raise DataError(f"--metric is {metric}, but the runs have no such metric{nearest(metric, known)}")
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--png needs matplotlib, which is not installed; pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=INCHES, dpi=DPI)
    for places in repetitions(runs):
        steps, low, mean, high = band([runs[index].curve(metric) for index in places])
        name = runs[places[0]].name
        (line,) = axes.plot(steps, mean, linewidth=1.2, label=name if len(places) == 1 else f"{name} ({len(places)} seeds)")
        if len(places) > 1:
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(written_out(metric), fontsize=8, parse_math=False)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    for text in axes.legend(fontsize=7, frameon=False).get_texts():
        text.set_parse_math(False)  # a name may have a dollar sign
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def band(curves: Sequence[dict[int, float]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that all `curves` have, and their lowest, mean and highest values there."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[step] for curve in curves] for step in steps]
    return steps, [min(v) for v in values], [sum(v) / len(v) for v in values], [max(v) for v in values]
