"""Estimators of the KL divergence to another policy from sampled tokens, and the controller of its weight.

Formulas and sources: docs/methods.md#kl-to-the-reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.errors import ConfigError, nearest

KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this many nats before exp, in every loss: at 88 float32 overflows."""
K3_LIMIT = 10.0
"""Largest k3 of a token in the loss, in nats; beyond it there is no gradient."""


def kl_per_token(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    estimator: str,
    *,
    sampler_log_probs: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:
    """Estimate KL(π‖π_ref) at tokens sampled from π, or from μ, in nats (http://joschu.net/blog/kl-approx.html).

    With d = log π − log π_ref: `k1` d; `k2` ½d²; `k3` exp(−d) + d − 1, never negative; `abs` |d|. As *values* k1 and k3
    are unbiased. As *losses* they differ: the mean gradient of k1 is 0 and that of k2 is the gradient of this KL; that
    of k3 is the gradient of KL(π_ref‖π), which agrees with it near π = π_ref.

    `sampler_log_probs` is the `unbiased` option, for tokens that another policy sampled (DeepSeek-V3.2, arXiv 2512.02556 §3.1):
    the estimate is multiplied by ρ = π/μ, and E_μ[ρ·k] = E_π[k]. The gradient flows through both factors, because
    ∇E_π[k] = E_μ[ρ·(k·∇log π + ∇k)]: without the first term it would be that of the paragraph above. So with k1 and k3
    value *and* gradient are those of KL(π‖π_ref) of a token given those before it, at π = μ too.

    Args:
        log_probs: float `[...]`, of the policy whose KL is estimated; gradients flow through it.
        ref_log_probs: float, same shape.
        estimator: one of `KL_ESTIMATORS`.
        sampler_log_probs: float, same shape, of the policy that sampled the tokens (the engine's), no gradient; None: no ratio.

        limit: the largest estimate of a token, before the ratio; beyond it there is no gradient. None: there is none.

    Log-ratios are clamped to ±`LOG_RATIO_LIMIT` before exp.

    Returns:
        The shape and dtype of `log_probs`.

    Raises:
        ConfigError: `estimator` is unknown.
    """
    if estimator not in KL_ESTIMATORS:
        known = ", ".join(KL_ESTIMATORS)
        raise ConfigError(f"KL estimator is '{estimator}'; it must be one of {known}{nearest(estimator, KL_ESTIMATORS)}")
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        estimate = difference
    elif estimator == "k2":
        estimate = difference * difference / 2
    elif estimator == "k3":
        difference = difference.clamp(min=-LOG_RATIO_LIMIT)
        estimate = torch.expm1(-difference) + difference
    else:
        estimate = difference.abs()
    if limit is not None:
        estimate = estimate.clamp(max=limit)
    return estimate if sampler_log_probs is None else log_ratio(log_probs, sampler_log_probs).exp() * estimate


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log π − log π_old, clamped to ±`LOG_RATIO_LIMIT`, beyond which there is no gradient; any shape."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class AdaptivePenalty:
    """β of PPO's penalty to the old policy, doubled or halved when the KL leaves its target (arXiv 1707.06347 §4).

    Args:
        coef: the first β, above 0.
        target: d_targ, the KL(π_old‖π_θ) per token that a step should end with, in nats; above 0.
    """

    def __init__(self, coef: float, target: float) -> None:
        self.coef, self.target = coef, target

    def update(self, kl: float) -> float:
        """β for the next step after one whose KL was `kl`: halved below target/1.5, doubled above 1.5·target."""
        if kl < self.target / 1.5:
            self.coef /= 2
        elif kl > self.target * 1.5:
            self.coef *= 2
        return self.coef


class AdaptiveKl:
    """β that is steered towards a target KL, for the KL term in the reward (Ziegler et al., arXiv 1909.08593 §2.2).

    Args:
        coef: the first β, at least 0.
        target: KL that β is steered to, in the units of what `update` is given; above 0.
        horizon: number of samples over which β can change by a factor of about e^0.2; above 0.

    Raises:
        ConfigError: an argument is out of its range.
    """

    LARGEST_ERROR = 0.2

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        for name, value, valid in (
            ("coef", coef, coef >= 0),
            ("target", target, target > 0),
            ("horizon", horizon, horizon > 0),
        ):
            if not valid:
                bound = "at least 0" if name == "coef" else "above 0"
                raise ConfigError(f"adaptive KL {name} is {value}; it must be {bound}")
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> float:
        """Move β after a step of `samples` responses whose mean KL was `kl`, and return it."""
        error = min(max(kl / self.target - 1, -self.LARGEST_ERROR), self.LARGEST_ERROR)
        self.coef *= max(1 + error * samples / self.horizon, 0.0)
        return self.coef

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint; target and horizon come from the config."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict()`'s answer."""
        self.coef = state["coef"]
