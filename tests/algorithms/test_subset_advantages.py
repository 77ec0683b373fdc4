"""pass@k training against an enumeration of all subsets, and against the closed form that was published for 0/1 rewards.

Formulas and sources: docs/methods.md#advantage-pass_at_k.
"""

from __future__ import annotations

import math
import statistics
from itertools import combinations

import pytest
import torch

from megarl.algorithms import ADVANTAGES, AdvantageInputs
from tests.algorithms.batches import B, batch, constant, places, same

EPS = 0.01


def by_enumeration(inputs: AdvantageInputs, k: int) -> list[float]:
    """For each response: over all k-subsets of its group, mean largest reward of those with it less that of all, by std."""
    want = []
    for row in range(len(inputs.scores)):
        peers = [i for i in range(len(inputs.scores)) if inputs.groups[i] == inputs.groups[row] and inputs.mask[i].any()]
        if row not in peers or len(peers) <= k:
            want.append(0.0)
            continue
        whole = {i: float(inputs.scores[i]) + sum(float(inputs.token_penalty[i, t]) for t in places(inputs, i)) for i in peers}
        subsets = {chosen: max(whole[i] for i in chosen) for chosen in combinations(peers, k)}
        spread = statistics.pstdev(subsets.values())
        own = statistics.fmean(reward for chosen, reward in subsets.items() if row in chosen)
        distance = own - statistics.fmean(subsets.values())
        want.append(0.0 if len({*subsets.values()}) == 1 else distance / (spread + EPS))
    return want


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_mean_over_all_subsets_that_hold_the_response(seed: int, k: int) -> None:
    groups = torch.tensor([3, 3, 3, 3, 3, 3, 3, 5, 5]) if k > 2 else None
    inputs = batch(seed, penalty=True, eps=EPS, **({"groups": groups} if groups is not None else {}))
    inputs.mask[1] = False
    outputs = ADVANTAGES.resolve("pass_at_k")(inputs, k=k)
    same(outputs.advantages, constant(inputs, by_enumeration(inputs, k)))
    assert outputs.dropped is not None
    sizes = [sum(int(inputs.groups[i] == g and inputs.mask[i].any()) for i in range(B)) for g in inputs.groups]
    assert outputs.dropped.tolist() == [bool(inputs.mask[i].any()) and sizes[i] <= k for i in range(B)]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("right", range(8))
def test_of_rewards_of_0_and_1_it_is_the_published_closed_form(right: int, k: int) -> None:
    """arXiv 2508.10751: with n wrong among G, R̄ = 1 − C(n,k)/C(G,k) and σ = √(R̄(1 − R̄))."""
    size = 7
    scores = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
    mask = torch.ones(size, 2, dtype=torch.bool)
    inputs = AdvantageInputs(
        scores=scores,
        token_penalty=torch.zeros(size, 2, dtype=torch.float64),
        mask=mask,
        groups=torch.zeros(size).long(),
        eps=EPS,
    )
    wrong = size - right
    mean = 1 - math.comb(wrong, k) / math.comb(size, k)
    sigma = math.sqrt(mean * (1 - mean))
    if_wrong = 1 - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1) if wrong else 0.0
    want = [(1.0 - mean) / (sigma + EPS)] * right + [(if_wrong - mean) / (sigma + EPS)] * wrong
    got = ADVANTAGES.resolve("pass_at_k")(inputs, k=k).advantages
    same(got, torch.tensor(want if 0 < mean < 1 else [0.0] * size, dtype=torch.float64)[:, None].expand(size, 2))


def test_subsets_that_all_have_one_reward_teach_exactly_nothing() -> None:
    """Eight of nine are right, so that every pair has a right one; ε is 0."""
    scores = torch.full((B,), 0.1, dtype=torch.float64)
    scores[4] = -1
    inputs = batch(0, scores=scores, groups=torch.zeros(B, dtype=torch.long), eps=0.0)
    assert ADVANTAGES.resolve("pass_at_k")(inputs, k=1).advantages.any()
    assert bool((ADVANTAGES.resolve("pass_at_k")(inputs, k=2).advantages == 0).all())


def test_a_subset_that_is_the_whole_group_teaches_nothing() -> None:
    inputs = batch(0, groups=torch.zeros(B, dtype=torch.long))
    assert ADVANTAGES.resolve("pass_at_k")(inputs, k=B - 1).advantages.any()
    outputs = ADVANTAGES.resolve("pass_at_k")(inputs, k=B)
    assert outputs.dropped is not None
    assert bool(outputs.dropped.all())


@pytest.mark.parametrize("k", [0, -1])
def test_no_subset_has_fewer_than_one(k: int) -> None:
    with pytest.raises(ValueError, match="needs k of at least 1"):
        ADVANTAGES.resolve("pass_at_k")(batch(), k=k)
