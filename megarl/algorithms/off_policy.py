"""The mismatch of the engine's log-probs and the trainer's, and corrections for it (docs/methods.md#rollout-correction).

Tokens were sampled from the engine's distribution ("rollout"), the losses take them as the trainer's ("old", the same
weights): Δ = logp_old − logp_rollout is what is wrong. A correction is a weight per token, a constant that multiplies the
token's loss, and a mask, from which the step's denominators are made (`token_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.catalogue import CORRECTION_BOUNDS
from megarl.algorithms.kl import kl_per_token
from megarl.algorithms.shard import WHOLE, Shard, batch_total, row_sums
from megarl.errors import ConfigError, nearest

CORRECTIONS = tuple(CORRECTION_BOUNDS)


@dataclass(frozen=True)
class Correction:
    """One correction and the ratios that it lets pass."""

    mode: str
    low: float
    high: float
    normalise: bool = False
    """Divide importance weights by their mean."""


def correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    corrections: Sequence[Correction],
    shard: Shard = WHOLE,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Weights and mask that correct for tokens sampled from the engine's distribution; of several their product and meet.

    With ρ = exp(Δ) of a token (`_token`) or exp(Σ_t Δ_t) of its whole response (`_sequence`):

    * `tis_token`, `tis_sequence`: truncated importance sampling, w = ρ clipped to [`low`, `high`].
    * `mis_token`, `mis_sequence`: masked importance sampling, w = ρ where `low` ≤ ρ ≤ `high`, else 0.
    * `mask_sequence`: w = 0 for a response whose geometric mean ratio exp(mean_t Δ_t) leaves [`low`, `high`], else 1.
    * `reject_sequence`: such a response is taken out of the mask.

    Importance sampling and masking leave the mask, and so every denominator, alone: E_rollout[ρ·f] = E_old[f] is a mean over
    *all* sampled tokens, and dividing by fewer would give back the weight that was cut. Rejection changes denominators: a
    rejected response is one that was never sampled, and the mean is over the others. `normalise` divides importance weights
    by their mean over the tokens (`_token`) or responses (`_sequence`) of `mask`: self-normalised importance sampling, which
    keeps the size of the gradient and is biased by order 1/n.

    Args:
        old_log_probs: float `[B, T]`, the trainer's, of the weights that sampled the tokens, in nats.
        rollout_log_probs: float `[B, T]`, the engine's; neither is read outside the mask.
        mask: bool `[B, T]`, sampled tokens of whole responses.
        corrections: any number; each is computed for itself from all of `mask`.
        shard: the way to the other rows of the batch, over which means and shares are.

    Returns:
        Weights `[B, T]` in the dtype of `old_log_probs`, 0 outside the kept mask; the kept mask, bool `[B, T]`; and
        `weight_mean`, the mean weight of the tokens in `mask`, `changed_tokens` and `changed_responses`, the shares whose
        weight was clipped or set to 0, or that were rejected (of responses: any of their tokens).

    Raises:
        ConfigError: a mode is unknown, or its `low` and `high` are no interval.
    """
    weights, kept, changed = mask.to(old_log_probs.dtype), mask, torch.zeros_like(mask)
    for rule in corrections:
        rule_weights, cut = _corrected(old_log_probs, rollout_log_probs, mask, rule, shard)
        weights *= rule_weights
        changed |= cut
        if rule.mode == "reject_sequence":
            kept = kept & ~cut
    counts = torch.stack([mask.sum(), mask.any(1).sum(), torch.count_nonzero(changed), changed.any(1).sum()])
    tokens, responses, changed_tokens, changed_responses = shard.total(counts).tolist()
    return (
        weights,
        kept,
        {
            "weight_mean": float(batch_total(row_sums(weights), shard)) / max(tokens, 1),
            "changed_tokens": changed_tokens / max(tokens, 1),
            "changed_responses": changed_responses / max(responses, 1),
        },
    )


def _corrected(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, one: Correction, shard: Shard
) -> tuple[Tensor, Tensor]:
    """Weights `[B, T]` of one correction, 0 outside the mask, and the tokens that it changes, bool `[B, T]`."""
    mode, low, high = one.mode, one.low, one.high
    if mode not in CORRECTIONS:
        raise ConfigError(
            f"off-policy correction is '{mode}'; it must be one of {', '.join(CORRECTIONS)}{nearest(mode, CORRECTIONS)}"
        )
    if not 0 <= low < high:
        raise ConfigError(f"the ratios of '{mode}' are bounded by [{low}, {high}]; it must be by 0 <= low < high")
    difference = torch.where(mask, old_log_probs - rollout_log_probs, 0).detach()
    is_mean = mode in ("mask_sequence", "reject_sequence")
    if mode.endswith("_sequence"):
        total = row_sums(difference)[:, None]
        if is_mean:
            total = total / mask.sum(1, keepdim=True).clamp(min=1)
        difference = total.to(difference.dtype)
    ratio = difference.exp().expand_as(mask)
    changed = mask & ((ratio < low) | (ratio > high))
    if mode.startswith("tis"):
        weights = torch.where(mask, ratio.clamp(low, high), 0)
    else:
        weights = torch.where(mask & ~changed, 1 if is_mean else ratio, 0)
    if one.normalise:
        of_rows, shares = row_sums(weights), mask.sum(1).double()
        if mode.endswith("_sequence"):
            of_rows, shares = of_rows / shares.clamp(min=1), shares.clamp(max=1)
        total, share = batch_total(torch.stack([of_rows, shares], 1), shard)
        mean = float(total / share.clamp(min=1))
        weights = weights / mean if mean else weights
    return weights, changed


def mismatch_sums(trainer: Tensor, rollout: Tensor) -> dict[str, Tensor | float]:
    """Distance of the engine from the trainer for the same weights, over sampled tokens, in nats; always reported.

    Args:
        trainer: float `[N]`, the trainer's log-probs.
        rollout: float `[N]`, the engine's.

    Returns:
        Sums over the tokens of |Δ| (`log_prob_abs`) and of k3 (`k3`), whose mean estimates KL(rollout‖trainer) without bias
        because the engine sampled the tokens; and the greatest |Δ| (`log_prob_max`). All 0 if there are none.
    """
    if not len(trainer):
        return {"log_prob_abs": 0.0, "log_prob_max": 0.0, "k3": 0.0}
    difference = trainer.detach() - rollout
    k3 = kl_per_token(-difference, difference.new_zeros(()), "k3")  # of log π_rollout − log π_trainer
    distance = difference.abs_()
    return {
        "log_prob_abs": distance.sum(dtype=torch.float64),
        "log_prob_max": distance.max(),
        "k3": k3.sum(dtype=torch.float64),
    }
