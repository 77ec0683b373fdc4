"""Advantages of several rewards, of subsets, of tokens and of turns in exact expectation: what their mean gradient is that of.

As in `test_exact_gradients.py` every episode of a small policy is enumerated. Here a first token 0 ends the episode, and
behind another first token something is told and the policy takes a second turn of one token, with logits of its own given the
first: 7 episodes of ragged lengths, with a hole in the mask.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import ADVANTAGES, AdvantageInputs, rewards_of_turns, turn_numbers

V, T = 3, 3
EPISODES: list[tuple[int, ...]] = [(0,), *itertools.product((1, 2), range(V))]
MASK = torch.tensor([[True, False, len(episode) == 2] for episode in EPISODES])


def parameters(seed: int = 0) -> list[Tensor]:
    """Logits of the first token `[V]`, and of the second given the first `[V, V]`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in ((V,), (V, V))]


def token_log_probs(logits: list[Tensor]) -> Tensor:
    """log π of the sampled tokens of every episode `[7, 3]`, 0 at what was told or is not there."""
    first, second = (part.log_softmax(-1) for part in logits)
    nothing = torch.zeros((), dtype=torch.float64)
    rows = [torch.stack([first[e[0]], nothing, second[e] if len(e) == 2 else nothing]) for e in EPISODES]
    return torch.stack(rows)


def collision(logits: list[Tensor]) -> Tensor:
    """Σ π² before the sampled tokens of every episode `[7, 3]`."""
    first, second = (part.softmax(-1).square().sum(-1) for part in logits)
    return torch.stack([torch.stack([first, first, second[e[0]]]) for e in EPISODES]).detach()


def random_rewards(seed: int) -> Tensor:
    """Of both turns of every episode, `[7, 2]`; 0 for a turn that is not there."""
    drawn = torch.randn(len(EPISODES), 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    first = drawn[[episode[0] for episode in EPISODES], 0]  # it is given before the second turn
    return torch.stack([first, drawn[:, 1] * MASK[:, 2]], dim=1)


def inputs_of(groups: list[tuple[int, ...]], logits: list[Tensor], of_turns: Tensor, **more: Any) -> AdvantageInputs:
    """Groups of episodes with rewards `of_turns` `[7, 2]`; the state before a second turn is the first token."""
    rows = [row for group in groups for row in group]
    mask, scores = MASK[rows], of_turns[rows].sum(1)
    turns = turn_numbers(mask)
    first = torch.tensor([EPISODES[row][0] for row in rows])
    return AdvantageInputs(
        scores=scores, token_penalty=torch.zeros(mask.shape, dtype=torch.float64), mask=mask,
        groups=torch.tensor([number for number, group in enumerate(groups) for _ in group]), normalisation="none", eps=0.0,
        turns=turns, turn_rewards=rewards_of_turns(scores, turns, of_turns[rows].tolist()),
        states=torch.where(mask, torch.where(turns == 1, 1 + first[:, None], 0), -1),
        old_log_probs=token_log_probs(logits).detach()[rows], collision=collision(logits)[rows], **more,
    )  # fmt: skip


def groups_of(size: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(len(EPISODES)), repeat=size))


def mean_gradient(
    name: str, logits: list[Tensor], inputs: AdvantageInputs, size: int, weights: Tensor | float = 1.0, **arguments: Any
) -> list[Tensor]:
    """E of the mean of Σ_t A_t·∇log π_t over a group, `inputs` being all groups of `size`; `weights` are for whole groups."""
    log_probs = token_log_probs(logits)
    rows = torch.tensor(groups_of(size))
    advantages = ADVANTAGES.resolve(name)(inputs, **arguments).advantages.view(*rows.shape, T)
    of_groups = (advantages * log_probs[rows]).sum(2).mean(1)
    probability = log_probs.detach().sum(1).exp()[rows].prod(1)
    return list(torch.autograd.grad((probability * weights * of_groups).sum(), logits))


def gradient_of_the_mean(logits: list[Tensor], rewards: Tensor) -> list[Tensor]:
    """∇E[r] of `rewards` `[7]`, one number per episode."""
    return list(torch.autograd.grad((token_log_probs(logits).sum(1).exp() * rewards).sum(), logits))


def gradient_of_turns(logits: list[Tensor], of_turns: Tensor, gamma: float) -> list[Tensor]:
    """E[Σ_u G_u·∇log π(turn u)] with G_u = Σ_{v≥u} γ^(v−u) r_v."""
    log_probs = token_log_probs(logits)
    returns = torch.stack([of_turns[:, 0] + gamma * of_turns[:, 1], torch.zeros(len(EPISODES)), of_turns[:, 1]], dim=1)
    mean = (log_probs.detach().sum(1).exp()[:, None] * returns * log_probs).sum()
    return list(torch.autograd.grad(mean, logits))


def equal(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.6])
@pytest.mark.parametrize("group", [2, 3])
def test_turn_rloo_has_the_gradient_of_discounted_turns(group: int, gamma: float) -> None:
    """Unbiased: the baseline is made of other episodes. With γ = 1 it is the gradient of E[r]."""
    logits, of_turns = parameters(), random_rewards(1)
    got = mean_gradient("turn_rloo", logits, inputs_of(groups_of(group), logits, of_turns, gamma=gamma), group)
    equal(got, gradient_of_turns(logits, of_turns, gamma))
    if gamma == 1:
        equal(got, gradient_of_the_mean(logits, of_turns.sum(1)))


@pytest.mark.parametrize("step_weight", [0.0, 0.7])
@pytest.mark.parametrize("group", [2, 3])
def test_the_bias_of_gigpo_is_that_of_comparing_with_oneself(group: int, step_weight: float) -> None:
    """Not divided, the episode's part is (G−1)/G of ∇E[r]. Of the step's part a turn in state s is scaled by
    E[(n−1)⁺]/E[n], n being how many of the group come to s: (G·p − 1 + (1−p)^G)/(G·p) with p the probability of s."""
    gamma, logits, of_turns = 0.6, parameters(), random_rewards(2)
    inputs = inputs_of(groups_of(group), logits, of_turns, gamma=gamma)
    got = mean_gradient("gigpo", logits, inputs, group, step_weight=step_weight, divide_by_std=False)
    episode = gradient_of_the_mean(logits, of_turns.sum(1))
    first, second = gradient_of_turns(logits, of_turns, gamma)
    p = logits[0].detach().softmax(-1)[:, None]
    shares = (group - 1) / group, (group * p - 1 + (1 - p) ** group) / (group * p)
    want = [
        shares[0] * episode[0] + step_weight * shares[0] * first,
        shares[0] * episode[1] + step_weight * shares[1] * second,
    ]
    equal(got, want)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("group", "k"), [(2, 1), (3, 1), (3, 2), (4, 3)])
def test_pass_at_k_has_the_gradient_of_the_best_of_k(group: int, k: int, binary: bool) -> None:
    """Times the σ that each group is divided by, it is (1/k − 1/G)·∇E[max of k]; with k = 1 the (G−1)/G of `dr_grpo`."""
    logits, of_turns = parameters(), random_rewards(3)
    if binary:
        of_turns = (of_turns > 0).double() * torch.tensor([0.0, 1.0])
    rewards = of_turns.sum(1)
    spreads = [
        statistics.pstdev(max(float(rewards[row]) for row in subset) for subset in itertools.combinations(rows, k))
        for rows in groups_of(group)
    ]
    inputs = inputs_of(groups_of(group), logits, of_turns)
    got = mean_gradient("pass_at_k", logits, inputs, group, torch.tensor(spreads, dtype=torch.float64), k=k)
    probability = token_log_probs(logits).sum(1).exp()
    subsets = torch.tensor(groups_of(k))
    want = torch.autograd.grad((probability[subsets].prod(1) * rewards[subsets].amax(1)).sum(), logits)
    equal(got, [(1 / k - 1 / group) * part for part in want])
    assert any(bool((part.abs() > 1e-3).any()) for part in want)


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_gdpo_weighs_sources_by_their_weights_and_not_by_their_scale(scale: float) -> None:
    """Groups of two and rewards of two values: every pair that differs is ±1/√2 of a source, whatever its scale, so that the
    gradient before the normalisation over the batch is Σ_k w_k/√2·∇P(r_k is the larger value): not that of the sum."""
    logits, rows = parameters(), [row for group in groups_of(2) for row in group]
    sources = {"a": (random_rewards(4).sum(1) > 0).double(), "b": (random_rewards(5).sum(1) > 0).double()}
    weights = {"a": 1.0, "b": 0.25}
    given = {"a": sources["a"][rows], "b": scale * sources["b"][rows] - 3}
    inputs = inputs_of(groups_of(2), logits, random_rewards(6), rewards_by_source=given, reward_weights=weights)
    both = sources["a"] + 0.25 * sources["b"]
    want = [part / math.sqrt(2) for part in gradient_of_the_mean(logits, both)]
    equal(mean_gradient("gdpo", logits, inputs, 2), want)


def test_the_optimal_token_baseline_of_all_that_can_happen_has_no_bias() -> None:
    """A group that has every episode as often as it is likely: its baselines are E[G_t·W_t]/E[W_t], the same for all."""
    quarters = [2, 1, 1], [[1, 1, 2], [2, 1, 1], [1, 2, 1]]
    logits = [torch.tensor(part, dtype=torch.float64).div(4).log().requires_grad_() for part in quarters]
    log_probs, of_turns = token_log_probs(logits), random_rewards(7)
    times = (16 * log_probs.detach().sum(1).exp()).round().long().tolist()
    rows = tuple(row for row, count in enumerate(times) for _ in range(count))
    assert len(rows) == 16
    advantages = ADVANTAGES.resolve("optimal_token_baseline")(inputs_of([rows], logits, of_turns)).advantages
    got = torch.autograd.grad((advantages * log_probs[list(rows)]).sum(1).mean(), logits)
    equal(list(got), gradient_of_the_mean(logits, of_turns.sum(1)))
    assert bool((advantages[:, 0] != advantages[:, 2]).any())


def test_the_optimal_token_baseline_loses_what_a_response_has_of_its_own_baseline() -> None:
    """A rare token has much energy, so that its own reward is most of its baseline; along ∇E[r] little is left in small groups.

    There is no closed form. `dr_grpo` keeps 1/2, 2/3 and 3/4. The cumulated energies of long responses are nearly equal.
    """
    logits, of_turns = parameters(), random_rewards(8)
    true = torch.cat([part.flatten() for part in gradient_of_the_mean(logits, of_turns.sum(1))])
    kept = []
    for group in (2, 3, 4):
        inputs = inputs_of(groups_of(group), logits, of_turns)
        got = torch.cat([part.flatten() for part in mean_gradient("optimal_token_baseline", logits, inputs, group)])
        kept.append(float(got @ true / true.square().sum()))
    assert kept == pytest.approx([0.0866, 0.1628, 0.2301], abs=1e-4)
