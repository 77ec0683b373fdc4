"""The spread of a step's lengths, rewards, group spreads and staleness are spread: a histogram each, a line per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

BINS = 20


def histogram(values: Sequence[float], bins: int = BINS) -> dict[str, Any]:
    """`{"low", "high", "counts"}`: the finite `values`, counted in `bins` equal bins from the least to the greatest of them.

    Values that are all equal are one bin.
    """
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite:
        return {"low": 0.0, "high": 0.0, "counts": []}
    low, high = min(finite), max(finite)
    counts = [0] * (bins if high > low else 1)
    for value in finite:
        index = int((value - low) / (high - low) * bins) if high > low else 0
        counts[min(index, len(counts) - 1)] += 1
    return {"low": low, "high": high, "counts": counts}


def distributions(
    lengths: Sequence[int], rewards: Sequence[float], groups: Sequence[int], staleness: Sequence[int]
) -> dict[str, Any]:
    """The histograms of a step whose samples have these values, one per sample; `groups` says which belong together.

    `group_std` is the standard deviation of the rewards within each group; 0 teaches nothing under a group estimator.
    """
    members: dict[int, list[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        members.setdefault(group, []).append(reward)
    by_name: Mapping[str, Sequence[float]] = {
        "response_tokens": lengths,
        "reward": rewards,
        "group_std": [_std(group) for group in members.values()],
        "staleness": staleness,
    }
    return {name: histogram(values) for name, values in by_name.items()}


def _std(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
