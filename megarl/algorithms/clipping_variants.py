"""Policy losses beside the clipped surrogate: other ratios, gates and weights, and tokens that are treated apart.

Formulas and sources: docs/methods.md#policy-losses. Arguments and results are those of `policy_losses.PolicyLoss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT, kl_per_token, log_ratio
from megarl.algorithms.policy_losses import POLICY_LOSSES, LossSettings, clipped_surrogate, ratio_sums


def _response_means(values: Tensor, response: Tensor) -> Tensor:
    """At every token the mean of `values` `[N]` over its response's tokens, `[N]`, without gradient."""
    responses = int(response.max()) + 1 if len(response) else 0
    total = values.new_zeros(responses).index_add(0, response, values.detach())
    return (total / torch.bincount(response, minlength=responses))[response]


@POLICY_LOSSES.register("dual_clip")
def dual_clip(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """`clip`, and for A < 0 never above −c·A, however large the ratio (arXiv 1912.09729). See `PolicyLoss`."""
    log_rho = log_ratio(log_probs, old_log_probs)
    loss, cut = clipped_surrogate(log_rho, advantages, settings, dual_clip=settings.dual_clip)
    return loss, ratio_sums(log_rho, cut)


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
    return loss, ratio_sums(log_rho, cut)


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
    return -sequence.exp() * advantages, ratio_sums(log_rho, cut) | sums


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
    sums = ratio_sums(log_rho, torch.zeros_like(advantages))
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
    return -weight * advantages * log_probs, ratio_sums(log_rho, weight != ratio)


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
    sums = ratio_sums(log_rho, torch.zeros_like(advantages))
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
    sums = ratio_sums(log_rho, cut | (left_out & (advantages != 0)))
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
    sums = ratio_sums(log_rho, torch.zeros_like(advantages))
    loss = -log_rho.exp() * advantages + coef * chosen * log_rho.abs()
    return loss, {"ratio": sums["ratio"], "clamped": sums["clamped"], "chosen": chosen.float().sum()}
