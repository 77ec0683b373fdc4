"""One gradient for all objectives (docs/evidence/methods.md#one-gradient): minus the gradient of each loss with respect to
every token's log-prob is its weight times its gradient coefficient GC, on random tensors in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageInputs,
    LossSettings,
    kl_per_token,
    token_weights,
    value_loss,
)
from megarl.algorithms.preference import PREFERENCE_LOSSES, PreferenceSettings, bco, kto
from megarl.algorithms.reward_model import pairwise_reward_loss, process_reward_loss
from tests.algorithms.batches import given_to

R, T = 8, 6
SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=1.8, kl_coef=0.7)
BETA = 0.3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = torch.arange(T) < torch.tensor([6, 1, 4, 3, 6, 2, 5, 4])[:, None]
RESPONSE = torch.arange(R)[:, None].expand(R, T)[MASK]
OLD = (-draw(R, T, seed=1).abs())[MASK]
NEW = OLD + 0.4 * draw(R, T, seed=2)[MASK]
REFERENCE = OLD + 0.4 * draw(R, T, seed=3)[MASK]
ADVANTAGE = draw(R, seed=4)[RESPONSE]
CHOSEN = torch.arange(len(OLD)) % 3 == 1  # as `given_to` says
CORRECT = torch.tensor([True, False, False, True, True, False, True, False])


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def coefficients(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """−∂Σloss/∂logp at `at`."""
    leaf = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return -gradient


def policy(name: str, advantages: Tensor, old: Tensor = OLD) -> Callable[[Tensor], Tensor]:
    more = given_to(name, len(old))
    return lambda new: POLICY_LOSSES.resolve(name)(new, old, advantages, response=RESPONSE, settings=SETTINGS, **more)[0]


def policy_coefficients(name: str) -> Tensor:
    """GC by the formula, for NEW against OLD."""
    ratio, a = (NEW - OLD).exp(), ADVANTAGE
    if name == "gspo":
        mean = torch.stack([(NEW - OLD)[i == RESPONSE].mean() for i in range(R)])
        ratio = mean.exp()[RESPONSE]
    inside = torch.where(a > 0, ratio <= 1.28, ratio >= 0.8)
    log_ratio = NEW - OLD
    kept = torch.where(a > 0, log_ratio <= 0.28, log_ratio >= -0.2)
    clipped = torch.where(a > 0, log_ratio.clamp(max=0.28), log_ratio.clamp(min=-0.2))
    geometric = torch.stack([clipped[i == RESPONSE].mean() for i in range(R)]).exp()[RESPONSE]
    gate = torch.sigmoid((1.05 - 0.05 * (a > 0).double()) * (ratio - 1))
    return {
        "gmpo": kept * geometric * a,
        "sapo": 4 * gate * (1 - gate) * ratio * a,
        "clip": inside * ratio * a,
        "gspo": inside * ratio * a,
        "dual_clip": inside * ~((a < 0) & (ratio > 1.8)) * ratio * a,
        "cispo": ratio.clamp(0.8, 1.28) * a,
        "reinforce": a,
        "kl_penalty": ratio * a - 0.7 * (ratio - 1),
        "clip_cov": ~CHOSEN * inside * ratio * a,
        "kl_cov": ratio * a - CHOSEN * log_ratio.sign(),
    }[name]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_policy_losss_coefficient_is_its_formula(name: str) -> None:
    got = coefficients(policy(name, ADVANTAGE), NEW)
    same(got, policy_coefficients(name))
    if name in ("clip", "dual_clip", "gspo", "gmpo", "clip_cov"):
        assert 0 < (got == 0).sum() < len(got)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_on_policy_every_policy_losss_coefficient_is_the_advantage_where_it_is_not_left_out(name: str) -> None:
    left_out = CHOSEN if name == "clip_cov" else torch.zeros_like(CHOSEN)
    same(coefficients(policy(name, ADVANTAGE, old=OLD), OLD), ADVANTAGE.masked_fill(left_out, 0))


def test_sft_has_coefficient_one_and_rft_that_of_being_right() -> None:
    """The weights carry 1/|o| and the number of responses; what is left of the gradient is GC."""
    weights = token_weights(MASK, "seq_mean_token_mean").double()[MASK]
    lengths = MASK.sum(1)[RESPONSE]
    same(R * lengths * coefficients(lambda new: -weights * new, NEW), (R * lengths * weights))
    torch.testing.assert_close(R * lengths * weights, torch.ones_like(weights), rtol=1e-6, atol=0)
    right = CORRECT[RESPONSE].double()
    kept = token_weights(MASK & CORRECT[:, None], "seq_mean_token_mean").double()[MASK]
    rft = int(CORRECT.sum()) * lengths * coefficients(lambda new: -kept * new, NEW)
    torch.testing.assert_close(rft, right, rtol=1e-6, atol=0)
    same(coefficients(policy("reinforce", right), NEW), right)


@pytest.mark.parametrize("name", ["clip", "reinforce", "cispo", "gspo"])
def test_grpos_coefficient_is_the_advantage_and_the_pull_to_the_reference(name: str) -> None:
    """GC = Â + β(ref/π − 1) at π = π_old, with Â from the estimator."""
    outputs = ADVANTAGES.resolve("grpo")(
        AdvantageInputs(
            scores=CORRECT.double(),
            token_penalty=torch.zeros(R, T, dtype=torch.float64),
            mask=MASK,
            groups=torch.arange(R) // 4,
        )
    )
    advantages = outputs.advantages[MASK]
    surrogate = policy(name, advantages, old=OLD)
    got = coefficients(lambda new: surrogate(new) + BETA * kl_per_token(new, REFERENCE, "k3"), OLD)
    same(got, advantages + BETA * ((REFERENCE - OLD).exp() - 1))


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_kl_estimators_coefficient_is_its_formula(estimator: str, unbiased: bool) -> None:
    d, ratio = NEW - REFERENCE, (NEW - OLD).exp()
    value, slope = {
        "k1": (d, torch.ones_like(d)),
        "k2": (d * d / 2, d),
        "k3": ((-d).exp() + d - 1, 1 - (-d).exp()),
        "abs": (d.abs(), d.sign()),
    }[estimator]
    got = coefficients(lambda new: kl_per_token(new, REFERENCE, estimator, sampler_log_probs=OLD if unbiased else None), NEW)
    same(got, -ratio * (value + slope) if unbiased else -slope)
    if estimator == "k3" and unbiased:
        same(got, -ratio * d)


@pytest.mark.parametrize("length_normalised", [False, True])
@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_a_preference_losss_coefficient_is_its_formula_at_every_token(name: str, length_normalised: bool) -> None:
    """DPO's is β·σ(−margin) on the chosen response's tokens and minus that on the rejected one's; RPO adds α/|y_w|."""
    constants: dict[str, Any] = {"label_smoothing": 0.1, "rpo_alpha": 0.4, "reward_shift": 0.3, "mixture": {"dpo": 1.0}}
    settings = PreferenceSettings(beta=BETA, length_normalised=length_normalised, **constants)
    tokens = -draw(2, R, T, seed=5).abs() * MASK
    reference = draw(2, R, seed=6)
    lengths = MASK.sum(1).double()
    rejected_lengths = lengths.flip(0)
    rejected_mask = MASK.flip(0)

    def loss(log_probs: Tensor) -> Tensor:
        chosen, rejected = (log_probs[0] * MASK).sum(1), (log_probs[1] * rejected_mask).sum(1)
        return PREFERENCE_LOSSES.resolve(name)(
            chosen, rejected, *reference, chosen_tokens=lengths, rejected_tokens=rejected_lengths, settings=settings
        )[0]

    got = coefficients(loss, tokens)
    h = torch.stack([(tokens[0] * MASK).sum(1), (tokens[1] * rejected_mask).sum(1)]) - reference
    per_chosen, per_rejected = torch.ones(R), torch.ones(R)
    if length_normalised and name not in ("simpo", "orpo"):
        per_chosen, per_rejected = 1 / lengths, 1 / rejected_lengths
        h = h * torch.stack([per_chosen, per_rejected])
    margin = BETA * (h[0] - h[1])
    push: Tensor | None = None  # on the rejected response, where it is not the chosen one's
    if name in ("dpo", "mixture"):
        pull = BETA * torch.sigmoid(-margin)
    elif name == "cdpo":
        pull = BETA * (0.9 * torch.sigmoid(-margin) - 0.1 * torch.sigmoid(margin))
    elif name == "robust_dpo":
        pull = BETA * (0.9 * torch.sigmoid(-margin) + 0.1 * torch.sigmoid(margin)) / 0.8
    elif name == "apo_zero":
        share = torch.sigmoid(BETA * h)
        pull, push = BETA * share * (1 - share)
    elif name == "apo_down":
        push = BETA * torch.sigmoid(margin) * torch.sigmoid(-margin)
        share = torch.sigmoid(BETA * h[0])
        pull = push - BETA * share * (1 - share)
    elif name == "bco_pair":
        pull, push = BETA * torch.sigmoid(0.3 - BETA * h[0]), BETA * torch.sigmoid(BETA * h[1] - 0.3)
    elif name == "simpo":
        per_chosen, per_rejected = 1 / lengths, 1 / rejected_lengths
        means = (h + reference) * torch.stack([per_chosen, per_rejected])
        pull = BETA * torch.sigmoid(0.5 - BETA * (means[0] - means[1]))
    elif name == "orpo":
        means = (h + reference) / torch.stack([lengths, rejected_lengths])
        odds = means.exp() / (1 - means.exp())
        pull = BETA * odds[1] / (odds[0] + odds[1])
        per_chosen, per_rejected = (1 + odds) / torch.stack([lengths, rejected_lengths])
    else:
        pull = 2 * (1 / (2 * BETA) - (h[0] - h[1]))
    alpha = 1.0 if name == "orpo" else 0.4
    same(got[0], (pull * per_chosen + alpha / lengths)[:, None] * MASK)
    same(got[1], (-(pull if push is None else push) * per_rejected)[:, None] * rejected_mask)


def test_ktos_coefficient_is_its_formula() -> None:
    log_probs, reference, z = draw(R, seed=7), draw(R, seed=8), torch.tensor(0.4, dtype=torch.float64)
    settings = PreferenceSettings(beta=BETA, desirable_weight=1.5, undesirable_weight=0.7)
    share = torch.sigmoid(BETA * (log_probs - reference - z))
    pull = BETA * share * (1 - share)
    got = coefficients(lambda new: kto(new, reference, CORRECT, z, settings)[0], log_probs)
    same(got, torch.where(CORRECT, 1.5 * pull, -0.7 * pull))


def test_bcos_coefficient_is_its_formula() -> None:
    log_probs, reference = draw(2, R, seed=7)
    reward = BETA * (log_probs - reference)
    got = coefficients(lambda new: bco(new, reference, CORRECT, PreferenceSettings(beta=BETA, reward_shift=0.3))[0], log_probs)
    same(got, torch.where(CORRECT, BETA * torch.sigmoid(0.3 - reward), -BETA * torch.sigmoid(reward - 0.3)))


def test_reward_models_and_critics_coefficients_are_their_residuals() -> None:
    """With respect to scores and values: what is missing of the probability, of the label and of the return."""
    chosen, rejected, margin = draw(3, R, seed=9)
    want = torch.sigmoid(-(chosen - rejected - margin))
    same(coefficients(lambda x: pairwise_reward_loss(x, rejected, margin)[0], chosen), want)
    same(coefficients(lambda x: pairwise_reward_loss(chosen, x, margin)[0], rejected), -want)
    labels = torch.rand(R, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    same(coefficients(lambda x: process_reward_loss(x, labels)[0], chosen), labels - torch.sigmoid(chosen))
    same(coefficients(lambda x: value_loss(x, rejected, margin)[0], chosen), margin - chosen)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_step_is_the_expectation_of_coefficients_over_responses_and_tokens(name: str) -> None:
    """E over responses of (1/|o|)·Σ_t GC·∇logp, whole: weights and loss together."""
    weights = token_weights(MASK, "seq_mean_token_mean").double()[MASK]
    loss = policy(name, ADVANTAGE)
    got = coefficients(lambda new: weights * loss(new), NEW)
    want = policy_coefficients(name) / (R * MASK.sum(1)[RESPONSE])
    if name == "gspo":  # the ratio of every token is carried by its own log-prob alone
        assert bool((got[policy_coefficients(name) == 0] == 0).all())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-12)
