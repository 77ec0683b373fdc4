"""Preference losses: pairs (DPO and its variants, APO, BCO, SimPO, ORPO, with the RPO term) by name; KTO and BCO for single
responses.

Formulas and sources: docs/methods.md#objectives.

Inputs are sums of token log-probs, one number per response. Losses are per pair or response: the caller divides by the
number of them in the whole optimizer step, over every rank and micro-batch, before the first backward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms.registry import Registry


@dataclass(frozen=True)
class PreferenceSettings:
    """The constants of the preference losses; each loss reads the ones it names."""

    beta: float = 0.1
    """β, the weight of the reference, above 0; of `simpo` the scale of its reward, of `orpo` the weight λ of the odds ratio."""
    label_smoothing: float = 0.0
    """s of `cdpo` and `robust_dpo`, in [0, ½): the share of pairs assumed to be the wrong way round."""
    target_margin: float = 0.5
    """γ of `simpo`, at least 0: by how much the chosen reward should exceed the other one."""
    length_normalised: bool = False
    """Log-ratios of the pair losses with a reference are means over a response's tokens (true) or sums (false)."""
    rpo_alpha: float = 0.0
    """α of every pair loss but `orpo`, which has it as 1: adds α·(−logp_w/|y_w|), the RPO term."""
    reward_shift: float = 0.0
    """δ of `bco` and `bco_pair`: the mean of all rewards β(logp − ref) of earlier optimizer steps, 0 before the first."""
    mixture: Mapping[str, float] = field(default_factory=dict)
    """Weights of `mixture`: of pair losses by name, and of `sft`, −logp_w/|y_w|."""
    desirable_weight: float = 1.0
    """λ_D of `kto`."""
    undesirable_weight: float = 1.0
    """λ_U of `kto`."""


class PreferenceLoss(Protocol):
    """A loss of pairs: (log-probs, reference log-probs) of chosen and rejected responses → (loss per pair, sums over pairs).

    Args:
        chosen: float `[P]`, log π_θ(y_w|x), summed over the response's tokens, in nats; gradients flow through it.
        rejected: float `[P]`, the same of y_l.
        ref_chosen: float `[P]`, log π_ref(y_w|x); no gradient. `simpo` and `orpo` do not read it.
        ref_rejected: float `[P]`, log π_ref(y_l|x), likewise.
        chosen_tokens: `[P]`, |y_w|, the number of tokens summed over, at least 1.
        rejected_tokens: `[P]`, |y_l|.
        settings: the constants.

    Returns:
        The loss `[P]`, and scalar sums over the pairs without gradient: `accuracy`, the number of pairs whose chosen
        response has the greater reward, equal ones as half; `chosen_reward` and `rejected_reward`, Σβ(logp − ref), of
        `simpo` and `orpo` Σβ·logp/|y|; `margin`, their difference. `bco_pair` adds `reward`, the sum of both sides' mean
        reward, which δ follows.
    """

    def __call__(
        self,
        chosen: Tensor,
        rejected: Tensor,
        ref_chosen: Tensor,
        ref_rejected: Tensor,
        *,
        chosen_tokens: Tensor,
        rejected_tokens: Tensor,
        settings: PreferenceSettings,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry("preference loss")
LARGEST_MEAN_LOG_PROB = -1e-6
"""`orpo` takes the odds of mean log-probs up to this many nats: at 0 the odds are infinite."""


def share_above(first: Tensor, second: Tensor) -> Tensor:
    """Accuracy of each comparison, float: 1 where `first` is above `second`, 0 where it is below, ½ where both are equal."""
    return (first > second).float() + 0.5 * (first == second)


def _pair_loss(
    name: str, *, has_reference: bool = True, has_rpo: bool = True, is_shifted: bool = False
) -> Callable[[Callable[[Tensor, Tensor, PreferenceSettings], Tensor]], PreferenceLoss]:
    """Register a formula of (h_w, h_l, settings) as the loss `name`, with the RPO term and the sums of `PreferenceLoss`.

    h `[P]` is logp − ref, with `length_normalised` divided by |y| (Tülu 3, arXiv 2411.15124); without a reference logp/|y|. The
    RPO term is α·(−logp_w/|y_w|) (iterative RPO, arXiv 2404.19733 eq. 1). `is_shifted`: δ follows the mean reward.
    """

    def file(formula: Callable[[Tensor, Tensor, PreferenceSettings], Tensor]) -> PreferenceLoss:
        @PREFERENCE_LOSSES.register(name)
        @wraps(formula)
        def loss(
            chosen: Tensor,
            rejected: Tensor,
            ref_chosen: Tensor,
            ref_rejected: Tensor,
            *,
            chosen_tokens: Tensor,
            rejected_tokens: Tensor,
            settings: PreferenceSettings,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            scores = (chosen - ref_chosen, rejected - ref_rejected) if has_reference else (chosen, rejected)
            if settings.length_normalised or not has_reference:
                scores = scores[0] / chosen_tokens, scores[1] / rejected_tokens
            sums, losses = _sums(*scores, settings), formula(*scores, settings)
            if is_shifted:
                sums["reward"] = (sums["chosen_reward"] + sums["rejected_reward"]) / 2
            if has_rpo and settings.rpo_alpha:
                losses = losses - settings.rpo_alpha * chosen / chosen_tokens
            return losses, sums

        return loss

    return file


def _sums(chosen_ratio: Tensor, rejected_ratio: Tensor, settings: PreferenceSettings) -> dict[str, Tensor]:
    chosen, rejected = (settings.beta * ratio.detach().float() for ratio in (chosen_ratio, rejected_ratio))
    return {
        "accuracy": share_above(chosen, rejected).sum(),
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
        "margin": (chosen - rejected).sum(),
    }


@_pair_loss("dpo")
def dpo(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """−log σ(β·[(logp_w − ref_w) − (logp_l − ref_l)]) (arXiv 2305.18290), plus the RPO term. See `PreferenceLoss`."""
    return -logsigmoid(settings.beta * (chosen - rejected))


@_pair_loss("cdpo")
def cdpo(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """`dpo` with s = `label_smoothing`: (1−s)·(loss of the pair) + s·(loss of the pair the other way round).

    Conservative DPO (Mitchell 2023, https://ericmitchell.ai/cdpo.pdf); the RPO term is not smoothed. See `PreferenceLoss`.
    """
    margin, share = settings.beta * (chosen - rejected), settings.label_smoothing
    return -(1 - share) * logsigmoid(margin) - share * logsigmoid(-margin)


@_pair_loss("robust_dpo")
def robust_dpo(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """((1−s)·(`dpo` of the pair) − s·(`dpo` of the pair the other way round))/(1−2s), s = `label_smoothing` (arXiv 2403.00409).

    Over labels that are swapped with probability s its mean is `dpo` of the true labels. The RPO term is left as it is.
    See `PreferenceLoss`.
    """
    margin, share = settings.beta * (chosen - rejected), settings.label_smoothing
    return (share * logsigmoid(-margin) - (1 - share) * logsigmoid(margin)) / (1 - 2 * share)


@_pair_loss("simpo", has_reference=False)
def simpo(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """−log σ(β·logp_w/|y_w| − β·logp_l/|y_l| − γ), γ = `target_margin` (arXiv 2405.14734), plus the RPO term.

    No reference is read. See `PreferenceLoss`.
    """
    return -logsigmoid(settings.beta * (chosen - rejected) - settings.target_margin)


@_pair_loss("orpo", has_reference=False, has_rpo=False)
def orpo(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """−m_w − β·log σ(log odds(m_w) − log odds(m_l)), m = logp/|y| and odds(m) = e^m/(1 − e^m) (arXiv 2403.07691).

    No reference is read, and there is no RPO term: −m_w is it. Odds are those of m up to `LARGEST_MEAN_LOG_PROB`, beyond
    which they have no gradient. See `PreferenceLoss`.
    """
    return -chosen - settings.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(mean: Tensor) -> Tensor:
    """log(e^m/(1 − e^m)) of mean log-probs m `[P]`."""
    bounded = mean.clamp(max=LARGEST_MEAN_LOG_PROB)
    return bounded - (-torch.expm1(bounded)).log()


@_pair_loss("ipo")
def ipo(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """(h − 1/(2β))² with h = (logp_w − ref_w) − (logp_l − ref_l) (arXiv 2310.12036 eq. 17), plus the RPO term.

    See `PreferenceLoss`.
    """
    return (chosen - rejected - 1 / (2 * settings.beta)) ** 2


@_pair_loss("apo_zero")
def apo_zero(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """(1 − σ(β(logp_w − ref_w))) + σ(β(logp_l − ref_l)): chosen responses up, rejected ones down (arXiv 2408.06266).

    For pairs whose chosen response is better than what the policy says. Plus the RPO term. See `PreferenceLoss`.
    """
    return torch.sigmoid(-settings.beta * chosen) + torch.sigmoid(settings.beta * rejected)


@_pair_loss("apo_down")
def apo_down(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """σ(β·h_w) + (1 − σ(β(h_w − h_l))), h = logp − ref: both responses down, rejected ones further (arXiv 2408.06266).

    For pairs whose chosen response is worse than what the policy says. Plus the RPO term. See `PreferenceLoss`.
    """
    return torch.sigmoid(settings.beta * chosen) + torch.sigmoid(settings.beta * (rejected - chosen))


@_pair_loss("bco_pair", is_shifted=True)
def bco_pair(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """−log σ(β·h_w − δ) − log σ(δ − β·h_l), h = logp − ref and δ = `reward_shift` (arXiv 2404.04656), plus the RPO term.

    A classifier of single responses: both sides are judged against δ, not against each other. See `PreferenceLoss`.
    """
    shift = settings.reward_shift
    return -logsigmoid(settings.beta * chosen - shift) - logsigmoid(shift - settings.beta * rejected)


@PREFERENCE_LOSSES.register("mixture")
def mixture(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    settings: PreferenceSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the losses in `settings.mixture`, each times its weight, as InternVL's MPO mixes them (arXiv 2411.10442).

    All read the same settings. The sums are those of the first loss that has them, and `<name>_loss` of every loss by itself.
    See `PreferenceLoss`.
    """
    total = torch.zeros_like(chosen)
    sums: dict[str, Tensor] = {}
    for name, weight in settings.mixture.items():
        of_loss: dict[str, Tensor] = {}
        if name == "sft":
            loss = -chosen / chosen_tokens
        else:
            loss, of_loss = PREFERENCE_LOSSES.resolve(name)(
                chosen,
                rejected,
                ref_chosen,
                ref_rejected,
                chosen_tokens=chosen_tokens,
                rejected_tokens=rejected_tokens,
                settings=settings,
            )
        total = total + weight * loss
        sums = of_loss | sums | {f"{name}_loss": loss.detach().sum()}
    return total, sums


def bco(
    log_probs: Tensor, ref_log_probs: Tensor, desirable: Tensor, settings: PreferenceSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """−log σ(β·h − δ) for a desirable response, −log σ(δ − β·h) for another, h = logp − ref (arXiv 2404.04656).

    Args:
        log_probs: float `[B]`, log π_θ(y|x), summed over the response's tokens, in nats; gradients flow through it.
        ref_log_probs: float `[B]`, log π_ref(y|x); no gradient.
        desirable: bool `[B]`.
        settings: β and δ.

    Returns:
        The loss `[B]`, and scalar sums without gradient: those of `kto`, and `reward`, Σβ(logp − ref), which δ follows.
    """
    centred = settings.beta * (log_probs - ref_log_probs) - settings.reward_shift
    loss = -logsigmoid(torch.where(desirable, centred, -centred))
    sums = _labelled_sums(log_probs - ref_log_probs, desirable, settings)
    return loss, sums | {"reward": sums["desirable_reward"] + sums["undesirable_reward"]}


def kto(
    log_probs: Tensor, ref_log_probs: Tensor, desirable: Tensor, kl_reference: Tensor, settings: PreferenceSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """λ_D·(1 − σ(β(h − z))) for a desirable response, λ_U·(1 − σ(β(z − h))) for another, h = logp − ref (arXiv 2402.01306 §4).

    Args:
        log_probs: float `[B]`, log π_θ(y|x), summed over the response's tokens, in nats; gradients flow through it.
        ref_log_probs: float `[B]`, log π_ref(y|x); no gradient.
        desirable: bool `[B]`.
        kl_reference: scalar z, `kto_kl_reference` of the same optimizer step; taken as a constant.
        settings: β, λ_D and λ_U.

    Returns:
        The loss `[B]`, and scalar sums without gradient: `desirable`, the number of desirable responses;
        `desirable_reward` and `undesirable_reward`, Σβ(logp − ref) over each kind.
    """
    ratio = log_probs - ref_log_probs
    distance = settings.beta * (ratio - kl_reference.detach())
    gain = settings.desirable_weight * torch.sigmoid(-distance)
    loss = torch.where(desirable, gain, settings.undesirable_weight * torch.sigmoid(distance))
    return loss, _labelled_sums(ratio, desirable, settings)


def _labelled_sums(ratio: Tensor, desirable: Tensor, settings: PreferenceSettings) -> dict[str, Tensor]:
    reward = settings.beta * ratio.detach().float()
    return {
        "desirable": desirable.float().sum(),
        # A mask as an index would have the host wait for the number of its elements.
        "desirable_reward": reward.where(desirable, 0).sum(),
        "undesirable_reward": reward.where(~desirable, 0).sum(),
    }


def mismatched_rows(prompts: Sequence[Hashable]) -> list[int]:
    """For each of N rows another row whose response does not answer its prompt, each row once; for `kto_kl_reference`.

    Where more than half of the rows share one prompt, some get a row of their own prompt; the caller leaves these out.
    """
    by_prompt: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(row)
    order = [row for rows in by_prompt.values() for row in rows]
    shift = max(map(len, by_prompt.values()), default=0)
    others = [0] * len(order)
    for position, row in enumerate(order):
        others[row] = order[(position + shift) % len(order)]  # past the end of its own prompt's rows
    return others


def kto_kl_reference(mismatched_log_probs: Tensor, mismatched_ref_log_probs: Tensor) -> Tensor:
    """KTO's reference point z = max(0, mean(log π_θ(y'|x) − log π_ref(y'|x))), a constant scalar (arXiv 2402.01306 §4.1).

    The responses y' belong to *other* prompts of the batch than the x they are scored after. β plays no part.

    Args:
        mismatched_log_probs: float `[M]`, log π_θ(y'|x) of the mismatched pairs of the whole optimizer step (every rank:
            the mean of micro-batches would make the loss depend on how the step is split).
        mismatched_ref_log_probs: float `[M]`, log π_ref(y'|x).

    Raises:
        ValueError: there are no pairs.
    """
    if mismatched_log_probs.numel() == 0:
        raise ValueError("kto_kl_reference needs at least one mismatched pair, but none were given")
    return (
        (mismatched_log_probs - mismatched_ref_log_probs).detach().double().mean().clamp(min=0).to(mismatched_log_probs.dtype)
    )
