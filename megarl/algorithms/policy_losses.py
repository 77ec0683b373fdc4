"""The policy losses: one number per sampled token, to be minimised, weighted by `aggregation` afterwards.

Formulas and sources: docs/methods.md#policy-losses.

All share one signature, so that a loss is a name in the config. They assume that masked tokens were left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT, kl_per_token, log_ratio
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


def _response_means(values: Tensor, response: Tensor) -> Tensor:
    """At every token the mean of `values` `[N]` over its response's tokens, `[N]`, without gradient."""
    responses = int(response.max()) + 1 if len(response) else 0
    total = values.new_zeros(responses).index_add(0, response, values.detach())
    return (total / torch.bincount(response, minlength=responses))[response]


def _sums(log_rho: Tensor, cut: Tensor) -> dict[str, Tensor]:
    clamped = (log_rho.detach().abs() >= LOG_RATIO_LIMIT).float().sum()
    return {"ratio": log_rho.detach().float().exp().sum(), "clipped": cut.float().sum(), "clamped": clamped}


@POLICY_LOSSES.register("clip")
def clip(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv 1707.06347); with ε_high = 0.28, DAPO's clip-higher (2503.14476). See `PolicyLoss`."""
    log_rho = log_ratio(log_probs, old_log_probs)
    loss, cut = clipped_surrogate(log_rho, advantages, settings)
    return loss, _sums(log_rho, cut)


@POLICY_LOSSES.register("dual_clip")
def dual_clip(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """`clip`, and for A < 0 never above −c·A, however large the ratio (arXiv 1912.09729). See `PolicyLoss`."""
    log_rho = log_ratio(log_probs, old_log_probs)
    loss, cut = clipped_surrogate(log_rho, advantages, settings, dual_clip=settings.dual_clip)
    return loss, _sums(log_rho, cut)


@POLICY_LOSSES.register("gspo")
def gspo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """`clip` with the sequence ratio s_i = exp(mean_t(logp − logp_old)) (GSPO-token, arXiv 2507.18071 eq. 13–14).

    The value at every token of response i is that of s_i; the gradient at token t is s_i·A_t·∇logp_t, so that
    `seq_mean_token_mean` gives GSPO's own gradient. ε is of the order of 3e-4 (low) and 4e-4 (high).
    The mean needs all tokens of a response in the same call. See `PolicyLoss`.
    """
    mean = _response_means(log_probs - old_log_probs, response).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_rho = mean + log_probs - log_probs.detach()
    loss, cut = clipped_surrogate(log_rho, advantages, settings)
    return loss, _sums(log_rho, cut)


@POLICY_LOSSES.register("gmpo")
def gmpo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """−s_i·A with s_i the geometric mean over a response's tokens of clipped ratios (GMPO, arXiv 2507.20673).

    log ρ is clipped from above at ε_high where A > 0 and from below at −ε_low where A < 0, so that ratios stay in
    [e^−ε_low, e^ε_high]. The value at every token of response i is that of s_i; the gradient at token t is s_i·A_t·∇logp_t, and
    0 where token t is clipped, so that `seq_mean_token_mean` gives GMPO's own gradient.
    The mean needs all tokens of a response in the same call. See `PolicyLoss`.
    """
    log_rho = log_ratio(log_probs, old_log_probs)
    gains, loses = advantages > 0, advantages < 0
    cut = (gains & (log_rho > settings.clip_high)) | (loses & (log_rho < -settings.clip_low))
    bounded = torch.where(cut, log_rho.detach().clamp(-settings.clip_low, settings.clip_high), log_rho)
    sequence = _response_means(bounded, response) + bounded - bounded.detach()
    sums = {"ratio": sequence.detach().float().exp().sum()}
    return -sequence.exp() * advantages, _sums(log_rho, cut) | sums


@POLICY_LOSSES.register("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    response: Tensor,
    settings: LossSettings,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """−(4/τ)·σ(τ(ρ − 1))·A: a soft gate in place of clipping (SAPO, arXiv 2511.20347). See `PolicyLoss`.

    The gradient at a token is 4p(1 − p)·ρA·∇logp with p = σ(τ(ρ − 1)): A at ρ = 1, and fading on both sides of it.

    Args:
        log_probs, old_log_probs, advantages, response, settings: as `PolicyLoss` says.
        tau_positive: τ of tokens with A > 0, above 0.
        tau_negative: τ of the others, above 0; the larger, the faster a token's gradient fades.
    """
    log_rho = log_ratio(log_probs, old_log_probs)
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    loss = -torch.sigmoid(tau * torch.expm1(log_rho)) * (4 / tau) * advantages
    sums = _sums(log_rho, torch.zeros_like(advantages))
    return loss, {"ratio": sums["ratio"], "clamped": sums["clamped"]}


@POLICY_LOSSES.register("cispo")
def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """−sg(clip(ρ, 1−ε_low, 1+ε_high))·A·logp: the weight is clipped, no token loses its gradient (arXiv 2506.13585).

    See `PolicyLoss`.
    """
    log_rho = log_ratio(log_probs, old_log_probs).detach()
    ratio = log_rho.exp()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -weight * advantages * log_probs, _sums(log_rho, weight != ratio)


@POLICY_LOSSES.register("reinforce")
def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """−A·logp (Williams 1992); right on-policy only, the ratio is reported and not used. See `PolicyLoss`."""
    ratio = log_ratio(log_probs, old_log_probs).detach().exp()
    return -advantages * log_probs, {"ratio": ratio.float().sum()}


@POLICY_LOSSES.register("kl_penalty")
def kl_penalty(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """−ρA + β·KL(π_old‖π_θ), PPO's penalty form (arXiv 1707.06347 §4), with β = `settings.kl_coef`. See `PolicyLoss`.

    The tokens were sampled from π_old, so k3 = ρ − 1 − log ρ estimates this KL without bias, in value and in gradient.
    The extra sum `kl_old` is Σ k3.
    """
    log_rho = log_ratio(log_probs, old_log_probs)
    kl = kl_per_token(old_log_probs, log_probs, "k3")
    loss = -log_rho.exp() * advantages + settings.kl_coef * kl
    sums = _sums(log_rho, torch.zeros_like(advantages))
    return loss, {"ratio": sums["ratio"], "clamped": sums["clamped"], "kl_old": kl.detach().float().sum()}


@POLICY_LOSSES.register("clip_cov")
def clip_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings, chosen: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """`clip`, and 0 without a gradient at the chosen tokens (Clip-Cov, arXiv 2505.22617). See `PolicyLoss`.

    Args:
        log_probs, old_log_probs, advantages, response, settings: as `PolicyLoss` says.
        chosen: float `[N]`, 1 at the tokens that `token_choice.tokens_within_covariances` picked from the step, else 0.
    """
    log_rho = log_ratio(log_probs, old_log_probs)
    loss, cut = clipped_surrogate(log_rho, advantages, settings)
    left_out = chosen > 0
    sums = _sums(log_rho, cut | (left_out & (advantages != 0)))
    return loss.masked_fill(left_out, 0), sums | {"chosen": left_out.float().sum()}


@POLICY_LOSSES.register("kl_cov")
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    response: Tensor,
    settings: LossSettings,
    chosen: Tensor,
    coef: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """−ρA, and at the chosen tokens + β·|log ρ| (KL-Cov, arXiv 2505.22617, as verl has it). See `PolicyLoss`.

    The paper writes KL(π_old‖π_θ) for the penalty. Its gradient is β·sign(log ρ), 0 at ρ = 1: the first of a step's updates
    has none.

    Args:
        log_probs, old_log_probs, advantages, response, settings: as `PolicyLoss` says.
        chosen: float `[N]`, 1 at the tokens that `token_choice.tokens_of_largest_covariance` picked from the step, else 0.
        coef: β, above 0.
    """
    log_rho = log_ratio(log_probs, old_log_probs)
    sums = _sums(log_rho, torch.zeros_like(advantages))
    loss = -log_rho.exp() * advantages + coef * chosen * log_rho.abs()
    return loss, {"ratio": sums["ratio"], "clamped": sums["clamped"], "chosen": chosen.float().sum()}
