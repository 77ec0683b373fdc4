"""The losses that training ranks compute: pure maths of `algorithms` applied to a stream's scored tokens.

Objectives are plain values: the driver sends them to the ranks. Their weights carry the global denominators, so a
loss is a sum, whatever the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import POLICY_LOSSES, LossSettings, kl_per_token, value_loss
from megarl.data.stream import PackedStream


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss, KL penalty in the loss and entropy bonus.

    Columns it reads: `weights`, `advantages`; `old_log_probs` (absent: the step is on-policy and the ratio is 1);
    `reference_log_probs` (absent: no KL is measured); `rollout_log_probs`; `correction` (absent: 1), which multiplies the
    policy loss alone. A stream with the column `ptx_weights` has supervised examples instead, mixed in with `ptx_coef`.
    """

    name: str
    settings: LossSettings = field(default_factory=LossSettings)
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    ptx_coef: float = 0.0
    shown_rows: int = 0
    """Of the batch: the log-probs of rows before this one come with the metrics, as `LOG_PROBS`."""

    def __call__(self, output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Any]]:
        """`output` float32 `[N, 2]` (log-prob, entropy) → (loss, sums over tokens)."""
        log_probs, entropy = output[:, 0], output[:, 1]
        columns = stream.columns
        if "ptx_weights" in columns:
            cross_entropy = -(columns["ptx_weights"] * log_probs).sum()
            return self.ptx_coef * cross_entropy, {"ptx/loss": float(cross_entropy.detach())}
        old = columns.get("old_log_probs", log_probs.detach())
        response = torch.repeat_interleave(
            torch.arange(len(stream.owners)), torch.tensor([len(places) for _, places, _ in stream.owners])
        ).to(log_probs.device)
        per_token, sums = POLICY_LOSSES.resolve(self.name)(
            log_probs, old, columns["advantages"], response=response, settings=self.settings
        )
        if "correction" in columns:
            per_token = per_token * columns["correction"]
        metrics: dict[str, Any] = {f"policy/{name}": float(value) for name, value in sums.items()}
        metrics["policy/loss"] = float((columns["weights"] * per_token.detach()).sum())
        loss = per_token - self.entropy_coef * entropy
        if "reference_log_probs" in columns:
            reference = columns["reference_log_probs"]
            if self.kl_coef:
                sampled_by = old if self.kl_unbiased else None
                loss = loss + self.kl_coef * kl_per_token(log_probs, reference, self.kl_estimator, old_log_probs=sampled_by)
            metrics["kl/reference"] = float(kl_per_token(log_probs.detach(), reference, "k3").sum())
        metrics |= mismatch_sums(old, columns["rollout_log_probs"])
        metrics |= {"policy/entropy": float(entropy.detach().sum()), "tokens": float(len(log_probs))}
        if self.shown_rows:
            metrics[LOG_PROBS] = {row: seen for row, seen in stream.split(log_probs).items() if row < self.shown_rows}
        return (columns["weights"] * loss).sum(), metrics


def mismatch_sums(trainer: Tensor, rollout: Tensor) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's for the same weights: sums of |Δ| and of k3, and max |Δ|."""
    if not len(trainer):
        return {"mismatch/log_prob_abs": 0.0, "mismatch/log_prob_max": 0.0, "mismatch/k3": 0.0}
    difference = (trainer.detach() - rollout).abs()
    return {
        "mismatch/log_prob_abs": float(difference.sum()),
        "mismatch/log_prob_max": float(difference.max()),
        "mismatch/k3": float(kl_per_token(rollout, trainer.detach(), "k3").sum()),
    }


@dataclass(frozen=True)
class ValueObjective:
    """Clipped value loss. Columns it reads: `weights`, `values` (the old ones), `returns`."""

    clip_range: float

    def __call__(self, output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, float]]:
        """`output` float32 `[N, 1]` → (loss, sums over tokens)."""
        values, columns = output[:, 0], stream.columns
        per_token, sums = value_loss(values, columns["values"], columns["returns"], self.clip_range)
        loss = (columns["weights"] * per_token).sum()
        error = columns["returns"] - values.detach()
        metrics = {f"critic/{name}": float(value) for name, value in sums.items()}
        return loss, metrics | {
            "critic/loss": float(loss.detach()),
            "critic/value": float(values.detach().sum()),
            "critic/error_squared": float((error * error).sum()),
            "tokens": float(len(values)),
        }


LOG_PROBS = "log_probs"
"""Of an update's metrics, the one that is no number: by row the trainer's log-probs, float32 `[L]`."""
SUMMED = frozenset({"policy/loss", "critic/loss", "ptx/loss"})
"""Metrics whose sum over ranks and micro-batches is the value itself; the other sums are divided by the tokens."""


def combine(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One update's metrics from its ranks' sums: means per token, maxima, and what only one rank reported.

    Where no rank counted `tokens`, the sums are the values.
    """
    log_probs = {row: seen for answer in answers for row, seen in answer.pop(LOG_PROBS, {}).items()}
    totals: dict[str, float] = {}
    for answer in answers:
        for name, value in answer.items():
            totals[name] = max(totals.get(name, value), value) if name.endswith("_max") else totals.get(name, 0) + value
    tokens = max(totals.pop("tokens", 0.0), 1.0)
    alone = {"grad_norm", "lr", "skipped", "non_finite"} | SUMMED
    means = {name: value if name in alone or name.endswith("_max") else value / tokens for name, value in totals.items()}
    return means | ({LOG_PROBS: log_probs} if log_probs else {})
