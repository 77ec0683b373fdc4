"""An update's metrics from what its ranks computed: sums become means per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.observe.expert_load import EXPERTS, routing_figures
from megarl.option_list import parts

LOG_PROBS = "log_probs"
"""Name of an update's metric that is no number: `LogProbs`."""
LogProbs = Mapping[int, npt.NDArray[np.float64]]
"""By row the trainer's log-probs, float64 `[L]`."""
SUMMED = frozenset({"policy/loss", "policy/nll", "policy/pair_accuracy", "policy/pair_margin", "critic/loss"})
"""Metrics whose sum over ranks and micro-batches is the value itself; those of options are in their `run.py`. The other sums
are divided by the tokens."""


def combine(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One update's metrics from its ranks' sums: means per token, maxima, what only one rank reported, and figures of experts.

    Where no rank counted `tokens`, the sums are the values.
    """
    log_probs = {row: seen for answer in answers for row, seen in answer.pop(LOG_PROBS, {}).items()}
    routed = {layer: row for answer in answers for layer, row in answer.pop(EXPERTS, {}).items()}
    totals: dict[str, float] = {}
    for answer in answers:
        for name, value in answer.items():
            totals[name] = max(totals.get(name, value), value) if name.endswith("_max") else totals.get(name, 0) + value
    tokens = max(totals.pop("tokens", 0.0), 1.0)
    alone = {"grad_norm", "lr", "skipped", "non_finite"} | SUMMED | _summed_by_options()
    means: dict[str, Any] = {
        name: value if name in alone or name.endswith("_max") else value / tokens for name, value in totals.items()
    }
    means |= routing_figures(routed) | {EXPERTS: routed} if routed else {}
    return means | ({LOG_PROBS: log_probs} if log_probs else {})


def _summed_by_options() -> set[str]:
    return {name for module in parts("run") for name in getattr(module, "SUMMED", ())}
