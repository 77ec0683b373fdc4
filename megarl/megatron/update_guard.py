"""Whether an optimizer step may be applied: judged before it, from the whole world's figures, by every rank alike.

A loss or gradient that is not finite never reaches the weights. Further limits are the user's (`run.guards`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.config.guard_rules import GuardRule, judge
from megarl.data.stream import PackedStream
from megarl.megatron.step import LossFunction


class WatchedLoss:
    """`loss_function` that remembers whether one of its losses was not finite."""

    def __init__(self, loss_function: LossFunction) -> None:
        self.loss_function = loss_function
        self._finite: list[Tensor] = []

    def __call__(self, output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Any]]:
        """The loss and metrics of `loss_function`, as they are."""
        loss, metrics = self.loss_function(output, stream)
        self._finite.append(torch.isfinite(loss.detach()))
        return loss, metrics

    @property
    def is_finite(self) -> bool:
        """Return whether all losses so far were finite; waits for the device."""
        return not self._finite or bool(torch.stack(self._finite).all())


def refusal(
    totals: Mapping[str, float], grad_norm: float, *, loss_is_finite: bool, rules: Sequence[GuardRule] = ()
) -> dict[str, float]:
    """Why the step must not be applied, as metrics: `non_finite` and `skipped`, each 0 or 1. Collective over the world.

    Args:
        totals: this rank's metric sums; empty where it does not report.
        grad_norm: of the whole model, the same on every rank.
        loss_is_finite: on this rank.
        rules: whose `metric` is `grad_norm` or a name in `totals`.
    """
    names = sorted({rule.metric for rule in rules if rule.metric != "grad_norm"})
    device = torch.cuda.current_device()
    sums = torch.tensor(
        [
            *(totals.get(name, 0.0) for name in names),
            *(float(name in totals) for name in names),
            totals.get("tokens", 0.0),
            float(not loss_is_finite),
        ],
        dtype=torch.float64,
        device=device,
    )
    largest = torch.tensor([totals.get(name, -math.inf) for name in names], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(sums)
    if names:
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    reduced = torch.cat([largest, sums]).tolist()
    greatest, (*values, tokens, bad_losses) = reduced[: len(names)], reduced[len(names) :]
    figures = {"grad_norm": grad_norm}
    for number, name in enumerate(names):
        if not values[len(names) + number]:
            continue
        is_sum = name.endswith("/loss") or not tokens
        mean = values[number] if is_sum else values[number] / tokens
        figures[name] = greatest[number] if name.endswith("_max") else mean
    non_finite = bool(bad_losses) or not math.isfinite(grad_norm)
    skipped = non_finite or judge(rules, figures) is not None
    return {"non_finite": float(non_finite), "skipped": float(skipped)}
