"""What the engine's log-probs and the trainer's disagree by, and corrections for it (docs/methods.md#rollout-correction).

Tokens were sampled from the engine's distribution ("rollout"), the losses take them as the trainer's ("old", the same
weights): Δ = logp_old − logp_rollout is what is wrong. A correction is a weight per token, a constant that multiplies the
token's loss, and a mask, from which the step's denominators are made (`token_weights`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.kl import kl_per_token
from megarl.errors import ConfigError, nearest

CORRECTIONS = ("tis_token", "tis_sequence", "mis_token", "mis_sequence", "reject_sequence")


def correction(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, mode: str, low: float, high: float
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Weights and mask that correct for tokens sampled from the engine's distribution.

    With ρ = exp(Δ) of a token (`_token`) or exp(Σ_t Δ_t) of its whole response (`_sequence`):

    * `tis_token`, `tis_sequence`: truncated importance sampling, w = min(ρ, `high`); `low` plays no part.
    * `mis_token`, `mis_sequence`: masked importance sampling, w = ρ where `low` ≤ ρ ≤ `high`, else 0.
    * `reject_sequence`: a response whose geometric mean ratio exp(mean_t Δ_t) leaves [`low`, `high`] is taken out of the
      mask; the tokens of the others weigh 1.

    Importance sampling leaves the mask, and so every denominator, alone: E_rollout[ρ·f] = E_old[f] is a mean over *all*
    sampled tokens, and dividing by fewer would give back the weight that was cut. Rejection changes denominators: a
    rejected response is one that was never sampled, and the mean is over the others.

    Args:
        old_log_probs: float `[B, T]`, the trainer's, of the weights that sampled the tokens, in nats.
        rollout_log_probs: float `[B, T]`, the engine's; neither is read outside the mask.
        mask: bool `[B, T]`, sampled tokens of whole responses.
        mode: one of `CORRECTIONS`.
        low: lowest ratio that counts, at least 0 (mis, reject).
        high: C, the highest ratio that counts, above `low`.

    Returns:
        Weights `[B, T]` in the dtype of `old_log_probs`, 0 outside the kept mask; the kept mask, bool `[B, T]`; and
        `weight_mean`, the mean weight of the tokens in `mask`, `changed_tokens` and `changed_responses`, the shares whose
        weight was truncated or set to 0, or that were rejected (of responses: any of their tokens).

    Raises:
        ConfigError: `mode` is unknown, or `low` and `high` are no interval.
    """
    if mode not in CORRECTIONS:
        raise ConfigError(
            f"off-policy correction is '{mode}'; it must be one of {', '.join(CORRECTIONS)}{nearest(mode, CORRECTIONS)}"
        )
    if mode.startswith("tis"):
        low = 0.0
    if not 0 <= low < high:
        raise ConfigError(f"the ratios of '{mode}' are bounded by [{low}, {high}]; it must be by 0 <= low < high")
    difference = torch.where(mask, old_log_probs - rollout_log_probs, 0).detach()
    if mode.endswith("_sequence"):
        total = difference.double().sum(1, keepdim=True)
        if mode == "reject_sequence":
            total = total / mask.sum(1, keepdim=True).clamp(min=1)
        difference = total.to(difference.dtype)
    ratio = difference.exp().expand_as(mask)
    kept = mask
    if mode.startswith("tis"):
        changed = mask & (ratio > high)
        weights = torch.where(mask, ratio.clamp(max=high), 0)
    else:
        changed = mask & ((ratio < low) | (ratio > high))
        weights = torch.where(mask & ~changed, ratio, 0)
    if mode == "reject_sequence":
        kept = mask & ~changed
        weights = kept.to(weights.dtype)
    tokens, responses = max(int(mask.sum()), 1), max(int(mask.any(1).sum()), 1)
    return (
        weights,
        kept,
        {
            "weight_mean": float(weights.sum(dtype=torch.float64)) / tokens,
            "changed_tokens": float(changed.sum()) / tokens,
            "changed_responses": float(changed.any(1).sum()) / responses,
        },
    )


def mismatch_sums(trainer: Tensor, rollout: Tensor) -> dict[str, Tensor | float]:
    """How far the engine is from the trainer for the same weights, over sampled tokens, in nats; always reported.

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
