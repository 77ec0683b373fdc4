"""The losses of a policy's update against exact expectations over small vocabularies: every token is enumerated."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import LossSettings
from megarl.experience.objectives import PolicyObjective

VOCABULARY = 7


def policies(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(count)]


def stream(**columns: Tensor) -> Any:
    """Every token of the vocabulary as a response of its own, weighted by the probability that it was sampled with."""
    return SimpleNamespace(columns=columns, response=torch.arange(VOCABULARY))


def test_the_unbiased_kl_is_that_of_the_policy_whatever_policy_sampled_the_tokens() -> None:
    """μ sampled, the step began at π_old, π_θ is trained: value and gradient are those of KL(π_θ‖π_ref)."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    new = logits.log_softmax(0)
    sampler, old, reference = policies(3)
    for is_given in (True, False):
        columns = {"weights": sampler.exp(), "advantages": torch.zeros(VOCABULARY), "reference_log_probs": reference}
        columns |= {"rollout_log_probs": sampler} | ({"old_log_probs": old} if is_given else {})
        objective = PolicyObjective("reinforce", kl_coef=1.0, kl_estimator="k3", kl_unbiased=True)
        loss, _ = objective(torch.stack([new, torch.zeros_like(new)], dim=1), stream(**columns))
        exact = (new.exp() * (new - reference)).sum()
        torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-14)
        (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


def test_without_old_log_probs_of_the_trainer_the_ratio_is_to_the_engine_and_the_gradient_exact() -> None:
    """E_μ[(π/μ)·A·∇log π] is the gradient of E_π[A] whatever μ was; the mismatch is still told."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    new, (sampler, advantages) = logits.log_softmax(0), policies(2, seed=4)
    columns = {"weights": sampler.exp(), "advantages": advantages, "rollout_log_probs": sampler}
    wide = LossSettings(clip_low=0.999, clip_high=1e6)
    objective = PolicyObjective("clip", wide, bypass=True)
    loss, metrics = objective(torch.stack([new, torch.zeros_like(new)], dim=1), stream(**columns))
    (got,) = torch.autograd.grad(-loss, logits, retain_graph=True)
    (want,) = torch.autograd.grad((new.exp() * advantages).sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)
    assert float(metrics["mismatch/log_prob_abs"]) == pytest.approx(float((new - sampler).abs().sum().detach()), rel=1e-12)


def test_tokens_far_from_the_reference_are_counted_and_limited_in_the_loss_alone() -> None:
    new = torch.full((VOCABULARY,), -1.0, dtype=torch.float64)
    reference = torch.tensor([-1.0, -1.2, 1.9, 2.1, 30.0, -1.0, -1.0], dtype=torch.float64)  # d = 0, 0.2, -2.9, -3.1, -31, 0, 0
    ones = torch.ones(VOCABULARY, dtype=torch.float64)
    columns = {"weights": ones, "advantages": 0 * ones, "reference_log_probs": reference, "rollout_log_probs": new}
    loss, metrics = PolicyObjective("reinforce", kl_coef=1.0)(torch.stack([new, 0 * new], dim=1), stream(**columns))
    exact = [math.exp(-d) + d - 1 for d in (0.2, -2.9, -3.1)]
    assert float(loss) == pytest.approx(exact[0] + 30.0, rel=1e-12)
    assert float(metrics["kl/clamped"]) == 3
    assert float(metrics["kl/reference"]) == pytest.approx(sum(exact) + math.exp(20) - 20 - 1, rel=1e-9)
    _, metrics = PolicyObjective("reinforce")(torch.stack([new, 0 * new], dim=1), stream(**columns))
    assert "kl/clamped" not in metrics


def test_the_top_share_cuts_the_policy_loss_alone_and_right_answers_have_a_term_of_their_own() -> None:
    """KL and entropy bonus are of every token; the cross-entropy has denominators of its own and no ratio."""
    new, old, reference, advantages = policies(4, seed=3)
    output = torch.stack([new, new.abs()], dim=1).requires_grad_()
    weights = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    top = torch.tensor([1.0, 0, 0, 1, 0, 1, 0], dtype=torch.float64)
    nll = torch.tensor([0.0, 0.25, 0.25, 0, 0, 0.5, 0], dtype=torch.float64)
    columns = {"weights": weights, "advantages": advantages, "old_log_probs": old, "rollout_log_probs": old}
    columns |= {"reference_log_probs": reference, "top_entropy": top, "nll_weights": nll, "correction": 2 * top + 1}
    objective = PolicyObjective("kl_penalty", kl_coef=0.5, entropy_coef=0.3, nll_coef=0.1)
    loss, metrics = objective(output, stream(**columns))
    ratio, d = (new - old).exp(), new - reference
    policy = top * (2 * top + 1) * (-ratio * advantages + (ratio - 1 - (new - old)))
    kl = (-d).exp() + d - 1
    want = (weights * (policy + 0.5 * kl - 0.3 * new.abs())).sum() - 0.1 * (nll * new).sum()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-14)
    (got,) = torch.autograd.grad(loss, output)
    slope = top * (2 * top + 1) * (-ratio * advantages + ratio - 1) + 0.5 * (1 - (-d).exp())
    torch.testing.assert_close(got[:, 0], weights * slope - 0.1 * nll, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(got[:, 1], -0.3 * weights, rtol=1e-12, atol=1e-14)
    assert float(metrics["policy/nll"]) == pytest.approx(-float((nll * new).sum()), rel=1e-12)
    assert float(metrics["policy/loss"]) == pytest.approx(float((weights * policy).sum()), rel=1e-12)


def test_chosen_tokens_and_numbers_reach_the_loss() -> None:
    new, old, advantages = policies(3, seed=6)
    chosen = torch.tensor([1.0, 0, 1, 0, 0, 0, 1], dtype=torch.float64)
    columns = {"weights": torch.ones_like(new), "advantages": advantages, "old_log_probs": old, "rollout_log_probs": old}
    objective = PolicyObjective("kl_cov", also_given=("chosen",), arguments={"coef": 0.4})
    loss, metrics = objective(torch.stack([new, 0 * new], dim=1), stream(**columns, chosen=chosen))
    want = (-(new - old).exp() * advantages + 0.4 * chosen * (new - old).abs()).sum()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-14)
    assert float(metrics["policy/chosen"]) == 3


OWN_LOSS = """
from megarl.algorithms import needs

@needs(teacher_log_probs=True, entropy=True, rollout_log_probs=True)
def f(log_probs, old_log_probs, advantages, *, response, settings, teacher_log_probs, entropy, rollout_log_probs, share):
    loss = -advantages * log_probs + share * entropy + 0 * rollout_log_probs
    return loss, {"gap": (log_probs - teacher_log_probs).detach().sum()}
"""


def test_a_loss_of_the_users_gets_the_teacher_the_entropy_and_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    new, sampler, teacher, advantages = policies(4, seed=9)
    output = torch.stack([new, new.abs()], dim=1).requires_grad_()
    columns = {"weights": sampler.exp(), "advantages": advantages, "rollout_log_probs": sampler, "teacher_log_probs": teacher}
    further = ("rollout_log_probs", "teacher_log_probs", "entropy")
    objective = PolicyObjective(f"{tmp_path / 'mine.py'}:f", also_given=further, arguments={"share": 0.3})
    loss, metrics = objective(output, stream(**columns))
    (got,) = torch.autograd.grad(loss, output)
    torch.testing.assert_close(got[:, 0], -sampler.exp() * advantages, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got[:, 1], 0.3 * sampler.exp(), rtol=1e-12, atol=1e-14)
    assert float(metrics["policy/gap"]) == pytest.approx(float((new - teacher).sum()), rel=1e-12)
