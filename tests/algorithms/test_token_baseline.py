"""The optimal token baseline token by token against plain Python in float64, with tool tokens and ragged, uneven groups.

Formula and source: docs/methods.md#advantage-optimal_token_baseline.
"""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms import ADVANTAGES, AdvantageInputs
from tests.algorithms.batches import B, batch, dense, places, rewards_of, same


def plain(inputs: AdvantageInputs) -> dict[int, list[float]]:
    """G_t less the mean of G_t over the group, weighted by the energy up to t; t counts sampled tokens."""
    assert inputs.old_log_probs is not None
    assert inputs.collision is not None
    to_go, energy = [], []
    for i in range(B):
        rewards, columns = rewards_of(inputs, i), places(inputs, i)
        to_go.append([sum(rewards[t:]) for t in range(len(rewards))])
        steps = [1 - 2 * float(inputs.old_log_probs[i, t].exp()) + float(inputs.collision[i, t]) for t in columns]
        energy.append([sum(steps[: t + 1]) for t in range(len(steps))])
    want: dict[int, list[float]] = {}
    for i in range(B):
        peers = [j for j in range(B) if inputs.groups[j] == inputs.groups[i] and to_go[j]]
        want[i] = []
        for t, own in enumerate(to_go[i]):
            with_token = [j for j in peers if len(to_go[j]) > t]
            total = sum(energy[j][t] for j in with_token)
            baseline = sum(energy[j][t] * to_go[j][t] for j in with_token) / total
            want[i].append(0.0 if len(with_token) == 1 else own - baseline)
    return want


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_has_the_baseline_of_its_place(seed: int, penalty: bool) -> None:
    inputs = batch(seed, penalty=penalty)
    inputs.mask[3] = False
    outputs = ADVANTAGES.resolve("optimal_token_baseline")(inputs)
    same(outputs.advantages, dense(inputs, plain(inputs)))
    assert outputs.advantages.isfinite().all()


def test_weighted_by_their_energy_the_advantages_of_a_place_cancel() -> None:
    """No other number for the place has a smaller Σ W·(G − b)²."""
    mask = torch.ones(B, 5, dtype=torch.bool)
    inputs = batch(1, mask=mask, groups=torch.zeros(B, dtype=torch.long), token_penalty=torch.zeros(B, 5, dtype=torch.float64))
    assert inputs.old_log_probs is not None
    assert inputs.collision is not None
    weights = (1 - 2 * inputs.old_log_probs.exp() + inputs.collision).cumsum(1)
    advantages = ADVANTAGES.resolve("optimal_token_baseline")(inputs).advantages
    same((weights * advantages).sum(0), torch.zeros(5, dtype=torch.float64))
    plain_mean = (inputs.scores - inputs.scores.mean())[:, None]
    assert bool(((weights * advantages**2).sum(0) < (weights * plain_mean**2).sum(0)).all())


def test_what_it_calls_energy_is_the_squared_gradient_in_the_logits() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    [gradient] = torch.autograd.grad(log_p[:, 4].sum(), logits)
    same(gradient.square().sum(1), (1 - 2 * log_p[:, 4].exp() + log_p.exp().square().sum(1)).detach())


def test_a_policy_that_is_sure_of_every_token_is_compared_with_the_mean() -> None:
    sure = {"old_log_probs": torch.zeros(B, 8, dtype=torch.float64), "collision": torch.ones(B, 8, dtype=torch.float64)}
    inputs = batch(2, groups=torch.zeros(B, dtype=torch.long), **sure)
    got = ADVANTAGES.resolve("optimal_token_baseline")(inputs).advantages
    first = [float(inputs.scores[i] - inputs.scores.mean()) for i in range(B)]
    same(torch.stack([got[i, places(inputs, i)[0]] for i in range(B)]), torch.tensor(first, dtype=torch.float64))
