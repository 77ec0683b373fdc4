"""SAPO, GMPO, SimPO, ORPO, robust DPO and DFT as their papers write them, on padded batches in float64, with autograd.

The references work on `[B, T]` with a mask and loops over responses; megarl's losses get the sampled tokens alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.algorithms import POLICY_LOSSES, LossSettings, dft_loss, token_weights
from megarl.algorithms.preference import PREFERENCE_LOSSES, PreferenceSettings

B, T = 6, 11
RATIO_SPREAD = 0.7
"""Standard deviation of log ρ: tokens of an older policy, far on both sides of every bound."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = torch.arange(T) < torch.tensor([11, 1, 7, 4, 9, 2])[:, None]
MASK[0, 3:6] = MASK[4, 1] = MASK[2, 5] = False  # tool tokens
OLD = (-draw(B, T, seed=1).abs() - 0.1).masked_fill(~MASK, float("nan"))
NEW = OLD + RATIO_SPREAD * draw(B, T, seed=2)
ADVANTAGES = torch.tensor([1.3, -0.8, -1.7, 0.6, 0.0, 0.6], dtype=torch.float64)
"""Of responses; one is 0, as in a group of equal rewards, and two are equal."""


def published_sapo(new: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    """−(1/B) Σ_i (1/|o_i|) Σ_t f(ρ)·A, f(ρ) = σ(τ(ρ − 1))·4/τ (arXiv 2511.20347)."""
    total = new.new_zeros(())
    for i in range(B):
        ratio = (new[i, MASK[i]] - OLD[i, MASK[i]]).exp()
        tau = tau_positive if ADVANTAGES[i] > 0 else tau_negative
        total = total - (4 / tau / (1 + (-tau * (ratio - 1)).exp()) * ADVANTAGES[i]).mean()
    return total / B


def published_gmpo(new: Tensor, low: float, high: float) -> Tensor:
    """−(1/B) Σ_i {Π_t min[ρ^sgn(A), clip(ρ, e^−low, e^high)^sgn(A)]^sgn(A)}^(1/|o_i|)·A (arXiv 2507.20673)."""
    total = new.new_zeros(())
    bounds = torch.tensor([-low, high], dtype=torch.float64).exp()
    for i in range(B):
        ratio, sign = (new[i, MASK[i]] - OLD[i, MASK[i]]).exp(), ADVANTAGES[i].sign()
        bounded = torch.min(ratio**sign, ratio.clamp(*bounds) ** sign) ** sign
        total = total - bounded.prod() ** (1 / len(ratio)) * ADVANTAGES[i]
    return total / B


def of_megarl(name: str, new: Tensor, settings: LossSettings, **arguments: float) -> Tensor:
    """The loss of the step, from two micro-batches."""
    weights = token_weights(MASK, "seq_mean_token_mean").double()
    total = new.new_zeros(())
    for rows in (torch.tensor([0, 2, 5]), torch.tensor([1, 3, 4])):
        mask = MASK[rows]
        response = torch.arange(len(rows))[:, None].expand_as(mask)[mask]
        advantages = ADVANTAGES[rows][:, None].expand_as(mask)[mask]
        loss, _ = POLICY_LOSSES.resolve(name)(
            new[rows][mask], OLD[rows][mask], advantages, response=response, settings=settings, **arguments
        )
        total = total + (weights[rows][mask] * loss).sum()
    return total


def compare(got: Tensor, want: Tensor, leaf: Tensor) -> Tensor:
    """Value and gradient; weights are float32, so both are equal to its rounding. Returns the gradient."""
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
    (got_gradient,) = torch.autograd.grad(got, leaf, retain_graph=True)
    (want_gradient,) = torch.autograd.grad(want, leaf, retain_graph=True)
    torch.testing.assert_close(got_gradient[MASK], want_gradient[MASK], rtol=1e-6, atol=1e-9)
    assert not got_gradient[~MASK].any()
    return got_gradient[MASK]


@pytest.mark.parametrize(("tau_positive", "tau_negative"), [(1.0, 1.05), (0.5, 3.0)])
def test_sapo_is_the_papers_objective(tau_positive: float, tau_negative: float) -> None:
    leaf = NEW.clone().requires_grad_()
    got = of_megarl("sapo", leaf, LossSettings(), tau_positive=tau_positive, tau_negative=tau_negative)
    compare(got, published_sapo(leaf, tau_positive, tau_negative), leaf)
    if tau_positive == 1.0:
        assert torch.equal(of_megarl("sapo", leaf, LossSettings()), got)  # the paper's temperatures are the defaults


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.3), (1.2, 5.0)])
def test_gmpo_is_the_papers_objective(low: float, high: float) -> None:
    leaf = NEW.clone().requires_grad_()
    got = of_megarl("gmpo", leaf, LossSettings(clip_low=low, clip_high=high))
    gradient = compare(got, published_gmpo(leaf, low, high), leaf)
    moves = (ADVANTAGES != 0)[:, None].expand_as(MASK)[MASK]
    assert bool(((gradient == 0) & moves).any()) is (low < 1)


def test_a_ratio_on_gmpos_bound_keeps_its_gradient() -> None:
    new = torch.tensor([0.5, -0.25, 0.5, -0.25], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    loss, sums = POLICY_LOSSES.resolve("gmpo")(
        new, torch.zeros(4), advantages, response=torch.arange(4), settings=LossSettings(clip_low=0.25, clip_high=0.5)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(gradient, -advantages * new.detach().exp())
    assert sums["clipped"] == 0


PAIRS = ((0, 1), (2, 0), (3, 4), (5, 5))
"""Rows of NEW as chosen and rejected responses; both sides of the last pair are equal."""


def response_mean(log_probs: Tensor, row: int) -> Tensor:
    """log of the geometric mean of the token probabilities of a response, tool tokens left out."""
    return log_probs[row, MASK[row]].mean()


def published_preference(name: str, new: Tensor, s: PreferenceSettings) -> Tensor:
    """SimPO (arXiv 2405.14734), ORPO (2403.07691), robust DPO (2403.00409), length-normalised DPO (Tülu 3, 2411.15124),
    APO-zero and APO-down (2408.06266), BCO (2404.04656), summed over PAIRS."""
    total = new.new_zeros(())
    for w, r in PAIRS:
        if name == "simpo":
            rewards = [s.beta * response_mean(new, row) for row in (w, r)]
            loss = -torch.sigmoid(rewards[0] - rewards[1] - s.target_margin).log()
        elif name == "orpo":
            p_w, p_l = (response_mean(new, row).exp() for row in (w, r))
            ratio = (p_w / (1 - p_w)) / (p_l / (1 - p_l))
            loss = -response_mean(new, w) + s.beta * -torch.sigmoid(ratio.log()).log()
        elif name == "dpo":
            rewards = [s.beta / MASK[row].sum() * (new - OLD)[row, MASK[row]].sum() for row in (w, r)]
            loss = -torch.sigmoid(rewards[0] - rewards[1]).log()
        elif name in ("apo_zero", "apo_down", "bco_pair"):
            r_w, r_l = (s.beta * (new - OLD)[row, MASK[row]].sum() for row in (w, r))
            loss = {
                "apo_zero": -torch.sigmoid(r_w) + torch.sigmoid(r_l) + 1,
                "apo_down": torch.sigmoid(r_w) - torch.sigmoid(r_w - r_l) + 1,
                "bco_pair": -torch.sigmoid(r_w - s.reward_shift).log() - torch.sigmoid(-(r_l - s.reward_shift)).log(),
            }[name]
        else:
            h_w, h_l = ((new[row, MASK[row]] - OLD[row, MASK[row]]).sum() for row in (w, r))
            right, swapped = -torch.sigmoid(s.beta * (h_w - h_l)).log(), -torch.sigmoid(s.beta * (h_l - h_w)).log()
            loss = ((1 - s.label_smoothing) * right - s.label_smoothing * swapped) / (1 - 2 * s.label_smoothing)
        total = total + loss
    return total


@pytest.mark.parametrize("name", ["simpo", "orpo", "robust_dpo", "dpo", "apo_zero", "apo_down", "bco_pair"])
@pytest.mark.parametrize(
    "constants", [{"beta": 2.0, "target_margin": 1.6, "label_smoothing": 0.2, "reward_shift": 0.7}, {"beta": 0.1}]
)
def test_a_preference_loss_is_the_papers(name: str, constants: dict[str, float]) -> None:
    settings = PreferenceSettings(**constants, length_normalised=name == "dpo")
    leaf = (-NEW.abs()).requires_grad_()
    sums = leaf.masked_fill(~MASK, 0).sum(1)
    references, lengths = OLD.masked_fill(~MASK, 0).sum(1), MASK.sum(1)
    chosen, rejected = (torch.tensor(side) for side in zip(*PAIRS, strict=True))
    loss, _ = PREFERENCE_LOSSES.resolve(name)(
        sums[chosen],
        sums[rejected],
        references[chosen],
        references[rejected],
        chosen_tokens=lengths[chosen],
        rejected_tokens=lengths[rejected],
        settings=settings,
    )
    compare(loss.sum(), published_preference(name, leaf, settings), leaf)


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean"])
def test_dft_is_the_papers_objective(mode: str) -> None:
    """−sg(π)·log π (arXiv 2508.05629), over tokens or responses, whose gradient is that of −π; in two micro-batches."""
    leaf = (-NEW.abs()).requires_grad_()
    rows = [(leaf[i, MASK[i]], leaf[i, MASK[i]].detach().exp()) for i in range(B)]
    if mode == "token_mean":
        want = -torch.cat([probability * log_probs for log_probs, probability in rows]).mean()
        slope = -torch.cat([log_probs.exp() for log_probs, _ in rows]).mean()
    else:
        want = -torch.stack([(probability * log_probs).mean() for log_probs, probability in rows]).mean()
        slope = -torch.stack([log_probs.exp().mean() for log_probs, _ in rows]).mean()
    weights = token_weights(MASK, mode).double()
    parts = [(weights[half][MASK[half]] * dft_loss(leaf[half][MASK[half]])).sum() for half in (slice(2), slice(2, B))]
    gradient = compare(parts[0] + parts[1], want, leaf)
    (probability_gradient,) = torch.autograd.grad(slope, leaf)
    torch.testing.assert_close(gradient, probability_gradient[MASK], rtol=1e-6, atol=1e-9)
