"""Distillation against exact expectations, every response of a small policy enumerated, and against dense float64 formulas.

The policy samples two tokens from a vocabulary of three, the second given the first; between them stands a token of a tool.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megarl.algorithms import ADVANTAGES
from megarl.options.distillation.formulas import (
    DIVERGENCES,
    TAIL_FLOOR,
    DistillationTerm,
    distillation_advantages,
    vocabulary_divergence,
)
from tests.algorithms.test_exact_gradients import SEQUENCES, drawn, inputs_of, parameters, token_log_probs

MASK = torch.tensor([[True, False, True]]).expand(len(SEQUENCES), 3)
COEF = 0.7


def with_tool(log_probs: Tensor) -> Tensor:
    """`[B, 2]` as `[B, 3]`, a tool's token in the middle, of which nobody may read the log-prob."""
    return torch.cat([log_probs[:, :1], torch.full_like(log_probs[:, :1], torch.nan), log_probs[:, 1:]], dim=1)


def advantages_of(student: Tensor, teacher: Tensor, gamma: float) -> Tensor:
    """Of both sampled tokens of every sequence, `[B, 2]`."""
    found = distillation_advantages(with_tool(student.detach()), with_tool(teacher), MASK, gamma)
    assert torch.equal(found[:, 1], torch.zeros(len(SEQUENCES), dtype=found.dtype))
    return found[:, [0, 2]]


def expected_gradient(logits: list[Tensor], advantages: Tensor, weights: Tensor | None = None) -> list[Tensor]:
    """E[Σ_t A_t·∇log π_t] over all sequences; `weights` `[B]` of each, the policy's own probability if there are none."""
    log_probs = token_log_probs(logits)
    weights = log_probs.detach().sum(1).exp() if weights is None else weights
    return list(torch.autograd.grad((weights[:, None] * advantages * log_probs).sum(), logits))


def close(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-10, atol=1e-13) for one, other in zip(got, want, strict=True))


def whole_kl(logits: list[Tensor], teacher: Tensor) -> Tensor:
    """KL(π‖π_T) between whole responses."""
    whole = token_log_probs(logits).sum(1)
    return (whole.exp() * (whole - teacher.sum(1))).sum()


def kl_of_tokens(logits: list[Tensor], teachers: list[Tensor]) -> Tensor:
    """Σ_t KL(π‖π_T) of the token t given those before it, as often as these occur, which the gradient takes as given."""
    (first, second), (teacher_first, teacher_second) = ([part.log_softmax(-1) for part in one] for one in (logits, teachers))
    of_second = (second.exp() * (second - teacher_second)).sum(-1)
    return (first.exp() * (first - teacher_first)).sum() + (first.detach().exp() * of_second).sum()


def test_without_discount_the_expected_gradient_is_that_of_each_tokens_own_kl_and_with_all_later_ones_of_the_whole() -> None:
    logits, _, teacher = drawn()
    student = token_log_probs(logits)
    own = [-part for part in torch.autograd.grad(kl_of_tokens(logits, parameters(1)), logits)]
    whole = [-part for part in torch.autograd.grad(whole_kl(logits, teacher), logits)]
    assert close(expected_gradient(logits, advantages_of(student, teacher, 0.0)), own)
    assert close(expected_gradient(logits, advantages_of(student, teacher, 1.0)), whole)
    # γ = 0 leaves out how the first token changes which second ones are met: E[KL of the second], as the first is chosen
    second, of_teacher = logits[1].detach().log_softmax(-1), parameters(1)[1].log_softmax(-1)
    later = (logits[0].softmax(-1) * (second.exp() * (second - of_teacher)).sum(-1)).sum()
    (left_out,) = torch.autograd.grad(-later, logits[0])
    torch.testing.assert_close(own[0] + left_out, whole[0], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(own[1], whole[1], rtol=1e-10, atol=1e-13)
    assert float(left_out.abs().max()) > 0.01


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_the_advantage_is_the_discounted_sum_over_sampled_tokens(gamma: float) -> None:
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 7, generator=generator) < 0.6
    mask[4] = False
    found = distillation_advantages(student, teacher, mask, gamma)
    for row in range(5):
        sampled = mask[row].nonzero().flatten().tolist()
        wanted = dict.fromkeys(range(7), 0.0)
        for place, t in enumerate(sampled):
            wanted[t] = -sum(gamma**step * float(student[row, k] - teacher[row, k]) for step, k in enumerate(sampled[place:]))
        assert found[row].tolist() == pytest.approx(list(wanted.values()), rel=1e-12, abs=1e-14)


def test_mixed_with_a_reward_the_gradient_is_that_of_the_weighted_sum() -> None:
    """w·E[r] − λ·KL(π‖π_T): RLOO of the reward over all pairs of responses, and γ = 1."""
    logits, rewards, teacher = drawn()
    weight, log_probs = 1.3, token_log_probs(logits)
    of_teacher = advantages_of(log_probs, teacher, 1.0)
    probability = log_probs.detach().sum(1).exp()
    total = torch.zeros((), dtype=torch.float64)
    for rows in itertools.product(range(len(SEQUENCES)), repeat=2):
        inputs = inputs_of(rows, rewards, torch.zeros(len(SEQUENCES), 2, dtype=torch.float64))
        mixed = weight * ADVANTAGES.resolve("rloo")(inputs).advantages + COEF * of_teacher[list(rows)]
        total = total + probability[list(rows)].prod() * (mixed * log_probs[list(rows)]).sum(1).mean()
    got = list(torch.autograd.grad(total, logits))
    objective = weight * (token_log_probs(logits).sum(1).exp() * rewards).sum() - COEF * whole_kl(logits, teacher)
    assert close(got, list(torch.autograd.grad(objective, logits)))


def test_of_stale_tokens_the_log_probs_at_the_start_of_the_step_are_the_right_ones() -> None:
    """μ sampled and the ratio π/μ corrects: with log π the gradient is exact, with the engine's log μ it is another one."""
    logits, _, teacher = drawn()
    student, sampler = token_log_probs(logits).detach(), token_log_probs(parameters(2))
    corrected = sampler.sum(1).exp() * (student - sampler).sum(1).exp()
    whole = [-part for part in torch.autograd.grad(whole_kl(logits, teacher), logits)]
    assert close(expected_gradient(logits, advantages_of(student, teacher, 1.0), corrected), whole)
    assert not close(expected_gradient(logits, advantages_of(sampler, teacher, 1.0), corrected), whole)


TOKENS, K, N = 9, 4, 6


def distributions(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[N, TOKENS]` of a student, log-probs of a teacher, and the teacher's K likeliest ids; in the first row tied."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 2 * torch.randn(2, N, TOKENS, generator=generator, dtype=torch.float64)
    teacher[0] = 0
    teacher = teacher.log_softmax(-1)
    return student.requires_grad_(), teacher, teacher.topk(K).indices


def joined(probabilities: Tensor, ids: Tensor) -> Tensor:
    """The outcomes told apart, and all others as one, `[N, K + 1]`."""
    told = probabilities.gather(1, ids)
    others = torch.ones_like(probabilities).scatter(1, ids, 0.0)
    return torch.cat([told, (probabilities * others).sum(1, keepdim=True)], dim=1)


def dense(p: Tensor, q: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence of probabilities `[N, C]`, and its derivative by each of p's, as published (up to a constant per row)."""
    mixture = beta * q + (1 - beta) * p
    if kind == "reverse_kl":
        return (p * (p / q).log()).sum(1), (p / q).log()
    if kind == "forward_kl":
        return (q * (q / p).log()).sum(1), -q / p
    value = beta * (q * (q / mixture).log()).sum(1) + (1 - beta) * (p * (p / mixture).log()).sum(1)
    return value, (1 - beta) * (p / mixture).log()


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_value_and_gradient_are_those_of_the_distributions_with_a_joined_tail(kind: str, beta: float) -> None:
    logits, teacher, ids = distributions()
    student = logits.log_softmax(-1)
    found, sums = vocabulary_divergence(student.gather(1, ids), teacher.gather(1, ids), DistillationTerm(1.0, kind, beta))
    p, q = joined(student.detach().exp(), ids), joined(teacher.exp(), ids)
    value, derivative = dense(p, q, kind, beta)
    torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-13)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    (got,) = torch.autograd.grad((weights * found).sum(), logits)
    # d/d logit_j = p_j (f_c − Σ p f), with c the outcome that token j belongs to
    of_token = derivative[:, -1:].expand(N, TOKENS).scatter(1, ids, derivative[:, :-1])
    centred = of_token - (p * derivative).sum(1, keepdim=True)
    torch.testing.assert_close(got, weights[:, None] * student.detach().exp() * centred, rtol=1e-9, atol=1e-12)
    assert float(sums["loss"]) == pytest.approx(float(value.sum()), rel=1e-12)
    assert float(sums["policy_tail"]) == pytest.approx(float(p[:, -1].sum()), rel=1e-10)
    assert float(sums["teacher_tail"]) == pytest.approx(float(q[:, -1].sum()), rel=1e-10)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_with_the_whole_vocabulary_it_is_the_divergence_and_with_less_at_most_that(kind: str) -> None:
    logits, teacher, _ = distributions(1)
    student = logits.detach().log_softmax(-1)
    whole = dense(student.exp(), teacher.exp(), kind, 0.3)[0]
    order, last = teacher.argsort(descending=True), torch.full((N,), -1e-12, dtype=torch.float64)
    for k in range(1, TOKENS + 1):
        ids = order[:, :k]
        found, _ = vocabulary_divergence(student.gather(1, ids), teacher.gather(1, ids), DistillationTerm(1.0, kind, 0.3))
        assert bool((found >= last - 1e-12).all()), k  # an outcome more is told apart
        last = found
    torch.testing.assert_close(last, whole, rtol=1e-10, atol=1e-13)


def test_the_jensen_shannon_divergence_ends_at_the_two_kls() -> None:
    logits, teacher, ids = distributions(2)
    student, teacher = logits.detach().log_softmax(-1).gather(1, ids), teacher.gather(1, ids)
    for kind, beta, share in (("forward_kl", 1e-7, 1e-7), ("reverse_kl", 1 - 1e-7, 1e-7)):
        jsd, _ = vocabulary_divergence(student, teacher, DistillationTerm(1.0, "jsd", beta))
        limit, _ = vocabulary_divergence(student, teacher, DistillationTerm(1.0, kind))
        torch.testing.assert_close(jsd / share, limit, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_distribution_is_at_no_distance_from_itself_and_a_tail_that_float32_does_not_see_stays_finite(kind: str) -> None:
    logits = torch.tensor([[50.0, 0.0, -3.0, 1.0], [0.5, 0.1, 0.2, -40.0]], requires_grad=True)
    student, term = logits.log_softmax(-1)[:, :3], DistillationTerm(1.0, kind)
    same, sums = vocabulary_divergence(student, student, term)
    assert same.tolist() == pytest.approx([0.0, 0.0], abs=1e-9)
    assert float(sums["teacher_tail"]) == pytest.approx(2 * TAIL_FLOOR, rel=1e-3)
    other = torch.tensor([[0.1, 2.0, 0.3, 0.4], [3.0, 0.2, 0.1, 9.0]]).log_softmax(-1)[:, :3]
    apart, _ = vocabulary_divergence(student, other, term)
    (gradient,) = torch.autograd.grad(apart.sum(), logits)
    assert bool(apart.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert bool((apart > 0).all())


def test_the_teacher_has_no_gradient() -> None:
    logits, teacher, ids = distributions()
    of_teacher = teacher.clone().requires_grad_()
    found, _ = vocabulary_divergence(logits.log_softmax(-1).gather(1, ids), of_teacher.gather(1, ids), DistillationTerm(1.0))
    assert torch.autograd.grad(found.sum(), of_teacher, allow_unused=True) == (None,)
