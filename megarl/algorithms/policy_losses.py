"""The policy losses: one number per sampled token, to be minimised, weighted by `aggregation` afterwards.

Formulas and sources: docs/methods.md#policy-losses.

All share one signature, so that a loss is a name in the config. They assume that masked tokens were left out. Here
are the clipped surrogate and REINFORCE; the others are in `clipping_variants.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT, log_ratio
from megarl.algorithms.registry import Registry
from megarl.algorithms.user_algorithms import load_policy_loss


@dataclass(frozen=True)
class LossSettings:
    """The constants of the policy losses; each loss reads the ones it names."""

    clip_low: float = 0.2
    """ε_low: ratios are clipped at 1 − ε_low."""
    clip_high: float = 0.2
    """ε_high: ratios are clipped at 1 + ε_high."""
    dual_clip: float = 3.0
    """c of `dual_clip`, above 1."""
    kl_coef: float = 1.0
    """β of `kl_penalty`, the weight of KL(π_old‖π_θ); no relation to the KL to the reference."""


class PolicyLoss(Protocol):
    """A policy loss: (log-probs, old log-probs, advantages) → (loss per token, sums over tokens).

    Args:
        log_probs: float `[N]`, log π_θ of the N sampled tokens of a micro-batch; gradients flow through it.
        old_log_probs: float `[N]`, of the policy that the ratio ρ is taken to; no gradient.
        advantages: float `[N]`; no gradient.
        response: int64 `[N]`, which response of the call each token belongs to, 0..R-1. *All* sampled tokens of a
            response must be in the same call (micro-batches never split one): `gspo` and `gmpo` take their mean.
        settings: the constants.

    A loss may take numbers of `algorithm.policy_loss_args` by name, as `sapo` does (`LossNeeds.arguments`), and `chosen` float
    `[N]`, 1 at tokens that were chosen before the update, as `clip_cov` does (`LossNeeds.choice`).
    A loss of the user's that says so by `needs` also takes `rollout_log_probs` or `reference_log_probs`, float `[N]`, by name.

    Returns:
        The loss `[N]`, and scalar sums over the tokens without gradient: `ratio`, Σρ (`gspo`, `gmpo`: of the sequence ratio);
        `clipped`, the number of tokens whose gradient clipping cut (`cispo`: whose weight it changed); `clamped`, of those
        whose log ρ reached ±`LOG_RATIO_LIMIT`; `chosen`, of those in `chosen`.
    """

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


TokenLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""A `PolicyLoss`, or a loss that must be given more by name."""
POLICY_LOSSES: Registry[TokenLoss] = Registry("policy loss", load_policy_loss)


def clipped_surrogate(
    log_rho: Tensor, advantages: Tensor, settings: LossSettings, *, dual_clip: float = math.inf
) -> tuple[Tensor, Tensor]:
    """−min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A) `[N]`, and where its gradient is cut (bool `[N]`).

    The gradient is cut where ρ has already left the interval in the direction that A asks for: ρ > 1+ε_high with A > 0,
    ρ < 1−ε_low with A < 0, and ρ > `dual_clip` with A < 0. Elsewhere the minimum is ρA.

    Args:
        log_rho: float `[N]`, log ρ, clamped as `kl.log_ratio` does; gradients flow through it.
        advantages: float `[N]`.
        settings: ε_low and ε_high.
        dual_clip: largest ρ that counts where A < 0.
    """
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    ratio = log_rho.exp()
    gains, loses = advantages > 0, advantages < 0
    cut = (gains & (ratio > high)) | (loses & ((ratio < low) | (ratio > dual_clip)))
    detached = ratio.detach()
    bounded = torch.where(loses, detached.clamp(low, dual_clip), detached.clamp(low, high))
    return -torch.where(cut, bounded, ratio) * advantages, cut


def ratio_sums(log_rho: Tensor, cut: Tensor) -> dict[str, Tensor]:
    """`ratio`, `clipped` and `clamped` of `PolicyLoss` from log ρ `[N]` and where its gradient is cut, bool `[N]`."""
    clamped = (log_rho.detach().abs() >= LOG_RATIO_LIMIT).float().sum()
    return {"ratio": log_rho.detach().float().exp().sum(), "clipped": cut.float().sum(), "clamped": clamped}


@POLICY_LOSSES.register("clip")
def clip(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv 1707.06347); with ε_high = 0.28, DAPO's clip-higher (2503.14476). See `PolicyLoss`."""
    log_rho = log_ratio(log_probs, old_log_probs)
    loss, cut = clipped_surrogate(log_rho, advantages, settings)
    return loss, ratio_sums(log_rho, cut)


@POLICY_LOSSES.register("reinforce")
def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """−A·logp (Williams 1992); right on-policy only, the ratio is reported and not used. See `PolicyLoss`."""
    ratio = log_ratio(log_probs, old_log_probs).detach().exp()
    return -advantages * log_probs, {"ratio": ratio.float().sum()}
