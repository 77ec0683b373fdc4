"""Reward shaping (docs/methods.md#reward-shaping) against plain Python in float64."""

from __future__ import annotations

import json
import math
import statistics
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import RewardNormaliser, aggregate_steps, clip_rewards, length_penalty, overlong_penalty
from megarl.algorithms.shaping import STEP_AGGREGATIONS
from megarl.errors import ConfigError
from megarl.options.reward_model.section import RewardModelConfig


def test_clipping_bounds_both_sides() -> None:
    assert clip_rewards(torch.tensor([-9.0, -1.0, 0.5, 9.0]), -2.0, 1.0).tolist() == [-2.0, -1.0, 0.5, 1.0]
    with pytest.raises(ConfigError, match=r"clipped to \[1.0, -1.0\]"):
        clip_rewards(torch.zeros(1), 1.0, -1.0)


@settings(max_examples=50, deadline=None)
@given(
    batches=st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6), min_size=1, max_size=5),
    offset=st.sampled_from([0.0, 1e6]),
)
def test_normalised_rewards_use_the_mean_and_std_of_all_rewards_so_far(batches: list[list[float]], offset: float) -> None:
    normaliser, so_far = RewardNormaliser(eps=0.01), []
    for batch in batches:
        rewards = torch.tensor(batch, dtype=torch.float64) + offset
        so_far += rewards.tolist()
        got = normaliser.normalise(rewards)
        mean, std = statistics.fmean(so_far), statistics.pstdev(so_far)
        want = [(r - mean) / (std + 0.01) for r in rewards.tolist()]
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)
        normaliser = resumed(normaliser)


def resumed(normaliser: RewardNormaliser) -> RewardNormaliser:
    """Another normaliser, from the state as a JSON checkpoint keeps it."""
    other = RewardNormaliser(normaliser.eps)
    other.load_state_dict(json.loads(json.dumps(normaliser.state_dict())))
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_that_are_all_equal_are_exactly_zero(dtype: torch.dtype) -> None:
    normaliser = RewardNormaliser(eps=0.0)
    for size in (1, 3, 7):
        got = normaliser.normalise(torch.full((size,), 0.1, dtype=dtype))
        assert got.dtype == dtype
        assert got.tolist() == [0.0] * size
    assert normaliser.normalise(torch.zeros(0, dtype=dtype)).shape == (0,)


def test_the_overlong_penalty_is_linear_over_the_cache_and_bounded() -> None:
    lengths = torch.tensor([0, 79, 80, 81, 90, 99, 100, 150])
    got = overlong_penalty(lengths, max_tokens=100, cache_tokens=20)
    want = [0.0, 0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0]
    assert got.tolist() == pytest.approx(want)


@pytest.mark.parametrize("cache_tokens", [0, 101])
def test_the_overlong_penalty_needs_a_cache_within_the_limit(cache_tokens: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to 100"):
        overlong_penalty(torch.tensor([1]), 100, cache_tokens)


def test_the_length_penalty_is_per_token() -> None:
    assert length_penalty(torch.tensor([0, 10, 200]), 0.01).tolist() == pytest.approx([0.0, -0.1, -2.0])


@pytest.mark.parametrize("how", STEP_AGGREGATIONS)
def test_a_responses_score_is_that_of_its_steps(how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(6, 9, generator=generator, dtype=torch.float64)
    ends = torch.rand(6, 9, generator=generator) < 0.4
    ends[2] = False
    ends[3] = torch.arange(9) == 0
    formula = {"mean": lambda x: sum(x) / len(x), "min": min, "product": math.prod, "last": lambda x: x[-1]}[how]
    rows = [[score for score, end in zip(*row, strict=True) if end] for row in zip(scores.tolist(), ends.tolist(), strict=True)]
    want = [formula(row) if row else 0.0 for row in rows]
    got = aggregate_steps(scores.masked_fill(~ends, float("nan")), ends, how)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_the_config_names_the_aggregations_of_steps() -> None:
    assert get_args(RewardModelConfig.model_fields["step_aggregation"].annotation) == STEP_AGGREGATIONS


def test_rewards_are_normalised_by_earlier_ones_without_counting_them() -> None:
    normaliser = RewardNormaliser()
    normaliser.normalise(torch.tensor([1.0, 3.0], dtype=torch.float64))
    before = normaliser.state_dict()
    got = normaliser.normalise(torch.tensor([2.0, 4.0], dtype=torch.float64), torch.tensor([False, False]))
    torch.testing.assert_close(got, torch.tensor([0.0, 2 / (1 + 1e-6)], dtype=torch.float64))
    assert normaliser.state_dict() == before
