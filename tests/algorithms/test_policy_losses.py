"""Policy losses, row by row against plain Python in float64, and the clip table with its gradients.

Formulas and sources: docs/methods.md#policy-losses.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algorithms import POLICY_LOSSES, LossSettings
from tests.algorithms.batches import given_to

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl_coef=0.7)
LENGTHS = (5, 1, 9, 3)


def tokens(spread: float = 0.6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log-probs, old log-probs, advantages (one per response, one of them 0) and response numbers in shuffled order."""
    generator = torch.Generator().manual_seed(seed)
    response = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    response = response[torch.randperm(len(response), generator=generator)]
    old = -torch.rand(len(response), generator=generator, dtype=torch.float64) - 0.1
    new = old + spread * torch.randn(len(response), generator=generator, dtype=torch.float64)
    return new.requires_grad_(), old, torch.tensor([1.3, -0.8, 0.0, -2.1], dtype=torch.float64)[response], response


def plain(
    name: str, new: list[float], old: list[float], adv: list[float], response: list[int]
) -> tuple[list[float], list[float]]:
    """The table's per-token terms, and d(sum)/d(logp_t) by hand, with loops over tokens."""
    s, losses, gradients = SETTINGS, [], []
    for t, a in enumerate(adv):
        rho = math.exp(new[t] - old[t])
        if name == "gspo":
            own = [i for i in range(len(new)) if response[i] == response[t]]
            rho = math.exp(sum(new[i] - old[i] for i in own) / len(own))
        if name == "gmpo":  # every token of a response has the same advantage here
            log_rhos = [new[i] - old[i] for i in range(len(new)) if response[i] == response[t]]
            clipped = [min(x, s.clip_high) if a > 0 else max(x, -s.clip_low) if a < 0 else x for x in log_rhos]
            mean = math.exp(sum(clipped) / len(clipped))
            own_is_cut = (a > 0 and new[t] - old[t] > s.clip_high) or (a < 0 and new[t] - old[t] < -s.clip_low)
            losses.append(-mean * a)
            gradients.append(0.0 if own_is_cut else -mean * a)
            continue
        low, high = 1 - s.clip_low, 1 + s.clip_high
        bounded = min(max(rho, low), high)
        chosen = t % 3 == 1  # as `given_to` says
        if name in ("clip", "dual_clip", "gspo", "clip_cov"):
            loss = -min(rho * a, bounded * a)
            gradient = 0.0 if (a > 0 and rho > high) or (a < 0 and rho < low) else -rho * a
            if name == "dual_clip" and a < 0 and rho > s.dual_clip:
                loss, gradient = -s.dual_clip * a, 0.0
            if name == "clip_cov" and chosen:
                loss, gradient = 0.0, 0.0
        elif name == "kl_cov":
            sign = (rho > 1) - (rho < 1)
            loss, gradient = -rho * a + chosen * abs(new[t] - old[t]), -rho * a + chosen * sign
        elif name == "cispo":
            loss, gradient = -bounded * a * new[t], -bounded * a
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            p = 1 / (1 + math.exp(-tau * (rho - 1)))
            loss, gradient = -4 / tau * p * a, -4 * p * (1 - p) * rho * a
        elif name == "reinforce":
            loss, gradient = -a * new[t], -a
        else:
            assert name == "kl_penalty"
            loss = -rho * a + s.kl_coef * (rho - 1 - (new[t] - old[t]))
            gradient = -rho * a + s.kl_coef * (rho - 1)
        losses.append(loss)
        gradients.append(gradient)
    return losses, gradients


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.6, 1.5])
def test_every_loss_is_its_row_of_methods_in_value_and_gradient(name: str, spread: float) -> None:
    new, old, advantages, response = tokens(spread)
    loss, _ = POLICY_LOSSES.resolve(name)(
        new, old, advantages, response=response, settings=SETTINGS, **given_to(name, len(new))
    )
    loss.sum().backward()
    want, gradient = plain(name, new.tolist(), old.tolist(), advantages.tolist(), response.tolist())
    torch.testing.assert_close(loss.detach(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(new.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-13)


CLIP_TABLE = [
    # ratio, advantage, objective (what is maximised), whether the token has a gradient
    (0.9, 2.0, 0.9 * 2.0, True),
    (1.1, -2.0, 1.1 * -2.0, True),
    (0.5, 2.0, 0.5 * 2.0, True),
    (0.5, -2.0, 0.8 * -2.0, False),
    (1.5, 2.0, 1.2 * 2.0, False),
    (1.5, -2.0, 1.5 * -2.0, True),
]


@pytest.mark.parametrize(("ratio", "advantage", "objective", "has_gradient"), CLIP_TABLE)
@pytest.mark.parametrize("name", ["clip", "dual_clip"])
def test_the_clip_table(name: str, ratio: float, advantage: float, objective: float, has_gradient: bool) -> None:
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss, sums = POLICY_LOSSES.resolve(name)(
        new, torch.zeros(1), torch.tensor([advantage]), response=torch.zeros(1, dtype=torch.long), settings=LossSettings()
    )
    loss.sum().backward()
    assert loss.item() == pytest.approx(-objective, rel=1e-12)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(-ratio * advantage if has_gradient else 0.0, rel=1e-12)
    assert sums["clipped"].item() == (0.0 if has_gradient else 1.0)
    assert sums["ratio"].item() == pytest.approx(ratio, rel=1e-6)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_and_of_no_other() -> None:
    new = torch.tensor([8.0, 8.0, 2.9], dtype=torch.float64).log().requires_grad_()
    loss, sums = POLICY_LOSSES.resolve("dual_clip")(
        new, torch.zeros(3), torch.tensor([-2.0, 2.0, -2.0]), response=torch.zeros(3, dtype=torch.long), settings=LossSettings()
    )
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([6.0, -2.4, 5.8], dtype=torch.float64))
    torch.testing.assert_close(new.grad, torch.tensor([0.0, 0.0, 5.8], dtype=torch.float64))
    assert sums["clipped"].item() == 2


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_ratio_beyond_float32_is_clamped_counted_and_has_no_gradient(name: str, advantage: float) -> None:
    """exp(200) is inf in float32, and one token must not be the whole step: log ρ is 20 there, without gradient."""
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, sums = POLICY_LOSSES.resolve(name)(
        new,
        torch.tensor([-201.0, -1.0]),
        torch.full((2,), advantage),
        response=torch.tensor([0, 1]),
        settings=SETTINGS,
        **{key: torch.zeros(2) for key in given_to(name, 2)},
    )
    loss.sum().backward()
    assert new.grad is not None
    assert bool(loss.isfinite().all())
    if name in ("clip", "dual_clip", "gspo", "clip_cov"):
        unbounded = advantage < 0 and name != "dual_clip"  # −ρA, which nothing but the clamp bounds
        first = {1.0: -1.28, 0.0: 0.0, -1.0: math.exp(20) if unbounded else 3.0}[advantage]
        assert loss.tolist() == pytest.approx([first, -advantage])
        assert sums["clipped"].item() == (advantage != 0 and not unbounded)
    if name == "gmpo":
        assert loss.tolist() == pytest.approx([{1.0: -math.exp(0.28), 0.0: 0.0, -1.0: math.exp(20)}[advantage], -advantage])
        assert sums["clipped"].item() == (advantage > 0)
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        assert loss.tolist() == pytest.approx([-4 / tau * advantage, -2 / tau * advantage])
    if name in ("clip", "dual_clip", "gmpo", "sapo", "clip_cov", "kl_cov"):
        assert new.grad.tolist() == [0.0, -advantage]
    if name == "kl_penalty":
        assert new.grad[0] == 0
    if name != "reinforce":
        assert sums["clamped"].item() == 1
        inside = POLICY_LOSSES.resolve(name)(
            torch.tensor([-1.0]),
            torch.tensor([-20.9]),
            torch.ones(1),
            response=torch.zeros(1).long(),
            settings=SETTINGS,
            **given_to(name, 1),
        )
        assert inside[1]["clamped"].item() == 0


@pytest.mark.parametrize("name", ["clip", "dual_clip", "gspo", "gmpo", "clip_cov"])
def test_the_clipped_metric_counts_the_tokens_without_gradient(name: str) -> None:
    new, old, advantages, response = tokens(1.5)
    loss, sums = POLICY_LOSSES.resolve(name)(
        new, old, advantages, response=response, settings=SETTINGS, **given_to(name, len(new))
    )
    loss.sum().backward()
    assert new.grad is not None
    assert sums["clipped"].item() == ((new.grad == 0) & (advantages != 0)).sum().item() > 0


def test_cispo_counts_clipped_weights_and_keeps_every_gradient() -> None:
    new, old, advantages, response = tokens(1.5)
    loss, sums = POLICY_LOSSES.resolve("cispo")(new, old, advantages, response=response, settings=SETTINGS)
    loss.sum().backward()
    ratio = (new - old).detach().exp()
    assert sums["clipped"].item() == ((ratio < 0.8) | (ratio > 1.28)).sum().item() > 0
    assert new.grad is not None
    assert bool((new.grad[advantages != 0] != 0).all())


def test_the_response_mean_of_gspos_token_losses_has_the_gradient_of_the_sequence_loss() -> None:
    new, old, advantages, response = tokens(0.05)
    wide = LossSettings(clip_low=0.9, clip_high=9.0)
    loss, _ = POLICY_LOSSES.resolve("gspo")(new, old, advantages, response=response, settings=wide)
    lengths = torch.tensor(LENGTHS)[response]
    (got,) = torch.autograd.grad((loss / lengths).sum(), new)
    sequences = torch.stack([(new - old)[response == i].mean().exp() * advantages[response == i][0] for i in range(4)])
    (want,) = torch.autograd.grad(-sequences.sum(), new)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_micro_batch_without_tokens_has_no_loss(name: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss, sums = POLICY_LOSSES.resolve(name)(
        empty,
        torch.zeros(0),
        torch.zeros(0),
        response=torch.zeros(0, dtype=torch.long),
        settings=SETTINGS,
        **given_to(name, 0),
    )
    assert loss.shape == (0,)
    assert all(value.item() == 0 and not value.requires_grad for value in sums.values())


def test_old_policys_kl_is_exact_in_expectation() -> None:
    """Over a whole vocabulary, weighted by π_old, the penalty and its gradient are those of KL(π_old‖π_θ)."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    old = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    loss, _ = POLICY_LOSSES.resolve("kl_penalty")(
        new, old, torch.zeros(7), response=torch.zeros(7, dtype=torch.long), settings=LossSettings(kl_coef=1.0)
    )
    penalty, exact = (old.exp() * loss).sum(), (old.exp() * (old - new)).sum()
    torch.testing.assert_close(penalty, exact, rtol=1e-12, atol=1e-14)
    (got,) = torch.autograd.grad(penalty, logits, retain_graph=True)
    (want,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)
