"""Baselines, KL placements and corrections in exact expectation: every response of a small policy is enumerated.

A policy over sequences of two tokens from a vocabulary of three, each token with logits of its own given the one before. The
mean of A·∇log π over everything that can be sampled must be the gradient of what is said to be maximised.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megarl.algorithms import ADVANTAGES, AdvantageInputs, RunningMean, kl_per_token

V, T, BETA = 3, 2, 0.3
SEQUENCES = list(itertools.product(range(V), repeat=T))


def parameters(seed: int) -> list[Tensor]:
    """Logits of the first token `[V]`, and of the second given the first `[V, V]`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((V,), (V, V))]


def token_log_probs(logits: list[Tensor]) -> Tensor:
    """log π of both tokens of every sequence, `[V², 2]`."""
    first, second = (part.log_softmax(-1) for part in logits)
    return torch.stack([torch.stack([first[a], second[a, b]]) for a, b in SEQUENCES])


def inputs_of(rows: tuple[int, ...], rewards: Tensor, penalty: Tensor, **more: object) -> AdvantageInputs:
    """The sequences `rows` as one group."""
    index = list(rows)
    return AdvantageInputs(
        scores=rewards[index], token_penalty=penalty[index], mask=torch.ones(len(rows), T, dtype=torch.bool),
        groups=torch.zeros(len(rows), dtype=torch.long), normalisation="none", **more,  # type: ignore[arg-type]
    )  # fmt: skip


def mean_gradient(
    name: str, logits: list[Tensor], rewards: Tensor, penalty: Tensor, group: int, **more: object
) -> list[Tensor]:
    """E over all groups of `group` sequences of the mean of Σ_t A_t·∇log π_t."""
    log_probs = token_log_probs(logits)
    probability = log_probs.detach().sum(1).exp()
    total = torch.zeros((), dtype=torch.float64)
    for rows in itertools.product(range(len(SEQUENCES)), repeat=group):
        weight = probability[list(rows)].prod()
        advantages = ADVANTAGES.resolve(name)(inputs_of(rows, rewards, penalty, **more)).advantages
        total = total + weight * (advantages * log_probs[list(rows)]).sum(1).mean()
    return list(torch.autograd.grad(total, logits))


def gradient_of_the_objective(logits: list[Tensor], rewards: Tensor, reference: Tensor, beta: float) -> list[Tensor]:
    """∇(E[r] − β·KL(π‖π_ref)) of whole sequences, by summing over them."""
    log_probs = token_log_probs(logits)
    whole = log_probs.sum(1)
    objective = (whole.exp() * (rewards - beta * (whole - reference.sum(1)))).sum()
    return list(torch.autograd.grad(objective, logits))


def drawn() -> tuple[list[Tensor], Tensor, Tensor]:
    logits = [part.requires_grad_() for part in parameters(0)]
    rewards = torch.randn(V**T, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return logits, rewards, token_log_probs(parameters(1))


CASES: list[tuple[str, int, dict[str, object]]] = [
    ("rloo", 2, {}),
    ("rloo", 3, {}),
    ("reinforce", 1, {}),
    ("reinforce_moving_baseline", 1, {"baseline": RunningMean(4, 0.7)}),
    ("remax", 1, {"greedy_scores": torch.full((1,), 0.4, dtype=torch.float64)}),
]


@pytest.mark.parametrize(("name", "group", "more"), CASES)
def test_a_kl_in_the_reward_has_the_gradient_of_the_penalised_objective(name: str, group: int, more: dict[str, object]) -> None:
    logits, rewards, reference = drawn()
    penalty = -BETA * kl_per_token(token_log_probs(logits).detach(), reference, "k1")
    got = mean_gradient(name, logits, rewards, penalty, group, **more)
    want = gradient_of_the_objective(logits, rewards, reference, BETA)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("group", [2, 3])
def test_the_group_mean_as_a_baseline_shrinks_the_same_gradient_by_the_share_of_the_others(group: int) -> None:
    logits, rewards, reference = drawn()
    penalty = -BETA * kl_per_token(token_log_probs(logits).detach(), reference, "k1")
    got = mean_gradient("dr_grpo", logits, rewards, penalty, group)
    for one, other in zip(got, gradient_of_the_objective(logits, rewards, reference, BETA), strict=True):
        torch.testing.assert_close(one, other * (group - 1) / group, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_no_other_estimator_in_the_reward_has_it(estimator: str) -> None:
    logits, rewards, reference = drawn()
    penalty = -BETA * kl_per_token(token_log_probs(logits).detach(), reference, estimator)
    got = mean_gradient("rloo", logits, rewards, penalty, 2)
    want = gradient_of_the_objective(logits, rewards, reference, BETA)
    assert any(not torch.allclose(one, other, rtol=1e-2) for one, other in zip(got, want, strict=True))


def values_of(logits: list[Tensor], rewards: Tensor) -> Tensor:
    """V of the policy before each token of every sequence, `[V², 2]`."""
    second = (logits[1].detach().softmax(-1) * rewards.reshape(V, V)).sum(1)
    first = (logits[0].detach().softmax(-1) * second).sum()
    return torch.stack([torch.stack([first, second[a]]) for a, _ in SEQUENCES])


def gae_gradient(logits: list[Tensor], rewards: Tensor, values: Tensor, arguments: dict[str, float]) -> list[Tensor]:
    """E over all sequences of Σ_t A_t·∇log π_t with A of `gae`."""
    log_probs, every = token_log_probs(logits), tuple(range(len(SEQUENCES)))
    inputs = inputs_of(every, rewards, torch.zeros_like(values), values=values)
    advantages = ADVANTAGES.resolve("gae")(inputs, **arguments).advantages
    probability = log_probs.detach().sum(1).exp()
    return list(torch.autograd.grad((probability * (advantages * log_probs).sum(1)).sum(), logits))


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_gae_by_length_has_the_exact_gradient_where_the_critic_is_right_and_is_biased_where_it_is_not(alpha: float) -> None:
    """λ of the two tokens is 0, ½ and ⅞. What the critic is trained on is exact with λ = 1 whatever it says."""
    logits, rewards, _ = drawn()
    want = gradient_of_the_objective(logits, rewards, torch.zeros(V**T, T, dtype=torch.float64), 0.0)
    right = values_of(logits, rewards)
    arguments = {"critic_lambda": 1.0, "length_alpha": alpha}
    for one, other in zip(gae_gradient(logits, rewards, right, arguments), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
    wrong = right + torch.randn(V**T, T, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wrong[:, 0] = wrong[0, 0]
    wrong[:, 1] = wrong[::V, 1].repeat_interleave(V)  # a value is of what came before
    biased = gae_gradient(logits, rewards, wrong, arguments)
    assert any(not torch.allclose(one, other, rtol=1e-2) for one, other in zip(biased, want, strict=True))
    every = tuple(range(len(SEQUENCES)))
    inputs = inputs_of(every, rewards, torch.zeros_like(wrong), values=wrong)
    probability = token_log_probs(logits).detach().sum(1).exp()
    for given, is_exact in ((arguments, True), ({"length_alpha": alpha}, False)):
        returns = ADVANTAGES.resolve("gae")(inputs, **given).returns
        assert returns is not None
        start = (probability * returns[:, 0]).sum()
        assert torch.allclose(start, right[0, 0], rtol=1e-10) is is_exact
