"""KL estimators: formulas, what they estimate in value and gradient over a whole vocabulary, and the adaptive weight."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from megarl.algorithms import KL_ESTIMATORS, AdaptiveKl, AdaptivePenalty, kl_per_token
from megarl.config.presets import KlEstimator
from megarl.errors import ConfigError


def policies() -> tuple[Tensor, Tensor, Tensor]:
    """Logits, their log-probs, and the reference's, over a vocabulary of 6."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(0), torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)


def test_the_config_names_the_estimators() -> None:
    assert set(get_args(KlEstimator)) == set(KL_ESTIMATORS)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_every_estimator_is_its_formula(estimator: str) -> None:
    _, new, reference = policies()
    formula = {
        "k1": lambda d: d,
        "k2": lambda d: 0.5 * d * d,
        "k3": lambda d: math.exp(-d) - (-d) - 1,
        "abs": abs,
    }[estimator]
    want = [formula(a - b) for a, b in zip(new.tolist(), reference.tolist(), strict=True)]
    got = kl_per_token(new, reference, estimator).detach()
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_values(estimator: str) -> None:
    _, new, reference = policies()
    exact = (new.exp() * (new - reference)).sum()
    torch.testing.assert_close((new.exp() * kl_per_token(new, reference, estimator)).sum(), exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("estimator", "direction"), [("k1", "none"), ("k2", "forward"), ("k3", "backward")])
def test_as_losses_the_estimators_follow_the_gradient_that_their_docstring_names(estimator: str, direction: str) -> None:
    logits, new, reference = policies()
    (got,) = torch.autograd.grad(
        (new.detach().exp() * kl_per_token(new, reference, estimator)).sum(), logits, retain_graph=True
    )
    exact = {
        "none": 0 * new.sum(),
        "forward": (new.exp() * (new - reference)).sum(),
        "backward": (reference.exp() * (reference - new)).sum(),
    }[direction]
    (want,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("estimator", "share"), [("k1", 1.0), ("k2", 0.05), ("k3", 0.05), ("abs", 0.6)])
def test_in_the_reward_only_k1_has_the_gradient_of_the_kl(estimator: str, share: float) -> None:
    """E_π[k·∇log π] near π_ref, exact over the vocabulary: its part along the gradient of KL(π‖π_ref)."""
    logits, new, _ = policies()
    reference = (new.detach() + 0.02 * torch.linspace(-1, 1, 6, dtype=torch.float64)).log_softmax(0)
    reward = kl_per_token(new.detach(), reference, estimator)
    (got,) = torch.autograd.grad((new.detach().exp() * reward * new).sum(), logits, retain_graph=True)
    (want,) = torch.autograd.grad((new.exp() * (new - reference)).sum(), logits)
    along = float((got @ want) / (want @ want))
    assert along == pytest.approx(1.0, rel=1e-12) if share == 1 else abs(along) < share


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_ratio_makes_value_and_gradient_those_of_the_kl_for_tokens_of_another_policy(
    estimator: str, on_policy: bool
) -> None:
    """Exact over the vocabulary, weighted by the policy that sampled; without gradient through the ratio it fails."""
    logits, new, reference = policies()
    old = new.detach() if on_policy else (new.detach() + torch.linspace(-0.5, 0.7, 6)).log_softmax(0)
    estimate = (old.exp() * kl_per_token(new, reference, estimator, sampler_log_probs=old)).sum()
    exact = (new.exp() * (new - reference)).sum()
    torch.testing.assert_close(estimate, exact, rtol=1e-12, atol=1e-14)
    (got,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (want,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_with_the_ratio_every_estimator_is_multiplied_by_it(estimator: str) -> None:
    _, new, reference = policies()
    old = reference.flip(0)
    got = kl_per_token(new, reference, estimator, sampler_log_probs=old)
    torch.testing.assert_close(got, (new - old).exp() * kl_per_token(new, reference, estimator))


def test_k3_is_never_negative_and_zero_at_the_reference() -> None:
    log_probs = -torch.rand(10_000, generator=torch.Generator().manual_seed(2)) * 5
    nearly = log_probs + 1e-4 * torch.randn(10_000, generator=torch.Generator().manual_seed(3))
    assert kl_per_token(log_probs, log_probs, "k3").abs().max() == 0
    assert kl_per_token(nearly, log_probs, "k3").min() >= -1e-11  # float32: the terms of 1e-4 cancel to 5e-9


def test_a_token_far_from_the_reference_is_limited_and_its_ratio_clamped() -> None:
    """d = −98 gave inf in float32; with a limit of 10 the estimate stops there, without gradient."""
    new = torch.tensor([-100.0, -3.0, -2.0, -1.0], requires_grad=True)
    reference = torch.tensor([-2.0, -0.2, -1.9, -40.0])
    estimate = kl_per_token(new, reference, "k3", limit=10.0)
    estimate.sum().backward()
    exact = [math.exp(-d) + d - 1 for d in (-2.8, -0.1)]
    assert estimate.tolist() == pytest.approx([10.0, 10.0, exact[1], 10.0], rel=1e-5)
    assert exact[0] > 10
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, 1 - math.exp(0.1), 0.0], rel=1e-5)
    assert kl_per_token(new, reference, "k3").isfinite().all()
    weighted = kl_per_token(torch.tensor([-1.0]), torch.tensor([-1.5]), "k1", sampler_log_probs=torch.tensor([-101.0]))
    assert weighted.item() == pytest.approx(0.5 * math.exp(20), rel=1e-5)


def test_ppos_penalty_is_halved_or_doubled_where_the_kl_leaves_its_target() -> None:
    penalty = AdaptivePenalty(1.0, target=0.01)
    assert [penalty.update(kl) for kl in (0.01, 0.0149, 0.0151, 0.02, 0.0067, 0.0066, 0.0)] == [1, 1, 2, 4, 4, 2, 1]


def test_an_unknown_estimator_is_one_sentence_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'abss'.*k1, k2, k3, abs \(did you mean 'abs'\?\)"):
        kl_per_token(torch.zeros(1), torch.zeros(1), "abss")


def test_adaptive_kl_moves_towards_its_target_by_a_bounded_step() -> None:
    controller = AdaptiveKl(0.1, target=6.0, horizon=1000.0)
    assert controller.update(6.0, samples=100) == pytest.approx(0.1)
    assert controller.update(6.6, samples=100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    before = controller.coef
    assert controller.update(600.0, samples=100) == pytest.approx(before * (1 + 0.2 * 0.1))
    before = controller.coef
    assert controller.update(0.0, samples=100) == pytest.approx(before * (1 - 0.2 * 0.1))


def test_adaptive_kl_continues_from_a_checkpoint() -> None:
    first, second = AdaptiveKl(0.1, 6.0, 100.0), AdaptiveKl(0.1, 6.0, 100.0)
    first.update(60.0, 32)
    second.load_state_dict(first.state_dict())
    assert second.update(3.0, 32) == first.update(3.0, 32)


@pytest.mark.parametrize("arguments", [(-0.1, 6.0, 10.0), (0.1, 0.0, 10.0), (0.1, 6.0, 0.0)])
def test_adaptive_kl_refuses_what_cannot_steer(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="adaptive KL"):
        AdaptiveKl(*arguments)
