"""Tokens that a loss treats apart, picked over a whole step: by dense formulas in float64, in every layout the same."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from megarl.algorithms import CHOICES, covariance, top_entropies

ROWS, T = 9, 11


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """log-probs, advantages (one per response, some tied) and a mask with holes, a row of it empty; NaN outside."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (ROWS,), generator=generator)
    mask = (torch.arange(T) < lengths[:, None]) & (torch.rand(ROWS, T, generator=generator) < 0.8)
    mask[0], mask[1] = False, True
    log_probs = -3 * torch.rand(ROWS, T, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([0.0, 1.5, -1.5, 1.5, 0.0, 2.0, -0.5, 0.7, -2.0], dtype=torch.float64)[:, None].expand(ROWS, T)
    nan = torch.full((), math.nan, dtype=torch.float64)
    return torch.where(mask, log_probs, nan), torch.where(mask, advantages, nan), mask


def plain_covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> dict[tuple[int, int], float]:
    """By token (row, column) in loops."""
    places = [(i, t) for i in range(len(mask)) for t in range(mask.shape[1]) if mask[i, t]]
    mean_log_prob = math.fsum(float(log_probs[place]) for place in places) / len(places)
    mean_advantage = math.fsum(float(advantages[place]) for place in places) / len(places)
    return {p: (float(log_probs[p]) - mean_log_prob) * (float(advantages[p]) - mean_advantage) for p in places}


def places_of(chosen: Tensor) -> set[tuple[int, int]]:
    return {(int(i), int(t)) for i, t in chosen.nonzero()}


def seeded(seed: int = 0, rows: int = ROWS) -> list[int]:
    return [1000 * seed + row for row in range(rows)]


@pytest.mark.parametrize("seed", range(3))
def test_covariances_are_their_formula_over_sampled_tokens_alone(seed: int) -> None:
    log_probs, advantages, mask = drawn(seed)
    found, want = covariance(log_probs, advantages, mask), plain_covariances(log_probs, advantages, mask)
    torch.testing.assert_close(found, torch.tensor([*want.values()], dtype=torch.float64), rtol=1e-10, atol=1e-12)
    both = torch.stack([log_probs[mask], advantages[mask]])
    torch.testing.assert_close(found.mean(), torch.cov(both, correction=0)[0, 1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("share", "count"), [(1e-4, 1), (0.1, 3), (0.5, 18), (1.0, 36)])
def test_kl_cov_takes_the_largest_covariances(share: float, count: int) -> None:
    log_probs, advantages, mask = drawn(4)
    want = plain_covariances(log_probs, advantages, mask)
    assert len(want) == 36
    chosen = CHOICES["kl_cov"](log_probs, advantages, mask, seeded(), share=share)
    assert places_of(chosen) == set(sorted(want, key=lambda place: -want[place])[:count])


def test_of_equal_covariances_kl_cov_takes_the_first_tokens() -> None:
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, 1] = False
    chosen = CHOICES["kl_cov"](torch.full((2, 4), -1.0), torch.zeros(2, 4), mask, seeded(rows=2), share=0.45)
    assert places_of(chosen) == {(0, 0), (0, 2), (0, 3)}


def test_clip_cov_picks_tokens_between_its_bounds_each_as_often_as_any_other() -> None:
    log_probs, advantages, mask = drawn(4)
    want = plain_covariances(log_probs, advantages, mask)
    eligible = {place for place, value in want.items() if 0.2 < value < 1.2}
    assert 8 < len(eligible) < len(want) - 8
    picks: Counter[tuple[int, int]] = Counter()
    for seed in range(3000):
        chosen = places_of(CHOICES["clip_cov"](log_probs, advantages, mask, seeded(seed), share=0.1, low=0.2, high=1.2))
        assert len(chosen) == 3
        picks.update(chosen)
    assert set(picks) == eligible
    probability = 3 / len(eligible)
    spread = math.sqrt(3000 * probability * (1 - probability))
    assert all(abs(number - 3000 * probability) < 5 * spread for number in picks.values())


def test_clip_cov_picks_all_that_there_are_and_none_where_none_lies_between_the_bounds() -> None:
    log_probs, advantages, mask = drawn(4)
    want = plain_covariances(log_probs, advantages, mask)
    few = {place for place, value in want.items() if 1.0 < value < 5.0}
    assert 0 < len(few) < 18
    assert places_of(CHOICES["clip_cov"](log_probs, advantages, mask, seeded(), share=0.5)) == few
    assert not CHOICES["clip_cov"](log_probs, advantages, mask, seeded(), low=50.0, high=60.0).any()


def test_clip_covs_pick_is_that_of_its_seed_and_hardly_moves_with_rounding() -> None:
    """Log-probs of another layout differ in the last places: a token may cross a bound, which may change one pick."""
    log_probs, advantages, mask = drawn(4)
    bound = sorted(plain_covariances(log_probs, advantages, mask).values())[15]
    settings = {"share": 0.1, "low": bound, "high": 9.0}
    first = places_of(CHOICES["clip_cov"](log_probs, advantages, mask, seeded(7), **settings))
    assert places_of(CHOICES["clip_cov"](log_probs, advantages, mask, seeded(7), **settings)) == first
    assert places_of(CHOICES["clip_cov"](log_probs, advantages, mask, seeded(8), **settings)) != first
    for low in (bound - 1e-9, bound + 1e-9):
        other = places_of(CHOICES["clip_cov"](log_probs, advantages, mask, seeded(7), **settings | {"low": low}))
        assert len(other - first) <= 1


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_a_choice_does_not_depend_on_the_order_of_responses(name: str) -> None:
    log_probs, advantages, mask = drawn(2)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    seeds, bounds = torch.tensor(seeded(3)), {"low": 0.1, "high": 3.0} if name == "clip_cov" else {}
    chosen = CHOICES[name](log_probs, advantages, mask, seeds.tolist(), share=0.2, **bounds)
    other = CHOICES[name](log_probs[order], advantages[order], mask[order], seeds[order].tolist(), share=0.2, **bounds)
    assert chosen.sum() > 3
    assert torch.equal(other, chosen[order])


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_a_step_without_sampled_tokens_has_no_choice(name: str) -> None:
    none = torch.zeros(2, 3, dtype=torch.bool)
    assert not CHOICES[name](torch.zeros(2, 3), torch.zeros(2, 3), none, seeded(rows=2)).any()
    assert not top_entropies(torch.zeros(2, 3), none, 0.5).any()


def test_a_share_that_is_a_whole_number_but_for_rounding_is_that_number() -> None:
    assert 0.29 * 100 < 29
    entropy, everything = torch.arange(100.0).reshape(4, 25), torch.ones(4, 25, dtype=torch.bool)
    assert top_entropies(entropy, everything, 0.29).sum() == 29


def test_rounding_does_not_tell_tokens_apart_that_are_the_same() -> None:
    """Four responses to one prompt begin with the same token, whose entropy and covariance are equal but for rounding."""
    mask = torch.ones(4, 3, dtype=torch.bool)
    entropy = torch.tensor([[1.5, 0.1, 0.2]]).repeat(4, 1) + torch.arange(12.0).reshape(4, 3) / 1000
    entropy[:, 0] = 1.5
    log_probs, advantages = entropy - 3, torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].expand(4, 3)
    for noise in (torch.zeros(4, 3), *1e-6 * torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(0))):
        assert places_of(top_entropies(entropy + noise, mask, 0.2)) == {(0, 0), (1, 0), (2, 0), (3, 0)}
        assert places_of(CHOICES["kl_cov"](log_probs + noise, advantages, mask, seeded(rows=4), share=0.1)) == {(0, 0)}


@pytest.mark.parametrize("share", [1e-3, 0.2, 0.29, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_top_entropies_are_those_at_or_above_the_last_of_the_share(seed: int, share: float) -> None:
    """A third of the entropies are tied; those of tool tokens and padding are the largest of all, and take no part."""
    generator = torch.Generator().manual_seed(seed)
    _, _, mask = drawn(seed)
    entropy = torch.rand(ROWS, T, generator=generator, dtype=torch.float64)
    entropy[torch.rand(ROWS, T, generator=generator) < 0.3] = 0.75
    entropy = torch.where(mask, entropy, 99.0)
    places = [(i, t) for i in range(ROWS) for t in range(T) if mask[i, t]]
    count = max(1, int(f"{share * 1000:.0f}") * len(places) // 1000)
    rounded = {place: round(float(entropy[place]), 4) for place in places}
    threshold = sorted(rounded.values(), reverse=True)[count - 1]
    chosen = top_entropies(entropy, mask, share)
    assert places_of(chosen) == {place for place in places if rounded[place] >= threshold}
    assert len(places_of(chosen)) >= count
