"""Advantages per token row by row against plain Python in float64, with tool tokens and ragged ends.

Formulas and sources: docs/methods.md#advantages.

Estimators that compare the responses of a group are in test_group_advantages.py.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import ADVANTAGES, AdvantageInputs, RunningMean, masked_whiten, token_rewards
from tests.algorithms.batches import B, T, batch, constant, dense, places, resolved, rewards_of, rows_of, same

WITH_PENALTY = (
    "gae",
    "reinforce",
    "reinforce_moving_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
)


def group_of(inputs: AdvantageInputs, row: int) -> list[float]:
    return [float(s) for s, g in zip(inputs.scores, inputs.groups, strict=True) if g == inputs.groups[row]]


def plain_whiten(rows: dict[int, list[float]], unbiased: bool, eps: float) -> dict[int, list[float]]:
    everything = [x for row in rows.values() for x in row]
    mean = statistics.fmean(everything)
    std = statistics.stdev(everything) if unbiased else statistics.pstdev(everything)
    return {i: [(x - mean) / (std + eps) for x in row] for i, row in rows.items()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bootstrap", [False, True])
def test_gae_is_the_sum_of_discounted_errors_over_sampled_tokens(seed: int, bootstrap: bool) -> None:
    after = torch.linspace(-1, 1, B, dtype=torch.float64)
    inputs = batch(seed, penalty=True, bootstrap_truncated=bootstrap, bootstrap_values=after, normalisation="none")
    assert inputs.values is not None
    assert inputs.truncated is not None
    advantages, returns = {}, {}
    for i in range(B):
        r, v = rewards_of(inputs, i), [float(inputs.values[i, t]) for t in places(inputs, i)]
        end = float(after[i]) if bootstrap and inputs.truncated[i] else 0.0
        delta = [r[k] + 0.9 * ([*v, end])[k + 1] - v[k] for k in range(len(r))]
        advantages[i] = [sum((0.9 * 0.8) ** b * delta[k + b] for b in range(len(r) - k)) for k in range(len(r))]
        returns[i] = [a + x for a, x in zip(advantages[i], v, strict=True)]
    outputs = ADVANTAGES.resolve("gae")(inputs)
    assert outputs.returns is not None
    same(outputs.advantages, dense(inputs, advantages))
    same(outputs.returns, dense(inputs, returns))


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [{"critic_lambda": 1.0}, {"critic_lambda": 0.0}, {"length_alpha": 0.3}, {"critic_lambda": 0.6, "length_alpha": 1.5}],
)
def test_gae_of_the_critic_and_of_a_responses_length_have_lambdas_of_their_own(
    arguments: dict[str, float], bootstrap: bool
) -> None:
    """Responses of 1 to 6 sampled tokens among tool tokens: λ is 1 − 1/(α·l) for advantages, where that is below 0 it is 0."""
    after = torch.linspace(-1, 1, B, dtype=torch.float64)
    inputs = batch(1, penalty=True, bootstrap_truncated=bootstrap, bootstrap_values=after, normalisation="none")
    assert inputs.values is not None
    assert inputs.truncated is not None
    advantages, returns, lambdas = {}, {}, set()
    for i in range(B):
        r, v = rewards_of(inputs, i), [float(inputs.values[i, t]) for t in places(inputs, i)]
        end = float(after[i]) if bootstrap and inputs.truncated[i] else 0.0
        delta = [r[k] + 0.9 * ([*v, end])[k + 1] - v[k] for k in range(len(r))]
        policy = max(0.0, 1 - 1 / (arguments["length_alpha"] * len(r))) if "length_alpha" in arguments else 0.8
        critic = arguments.get("critic_lambda", policy)
        lambdas.add(policy)
        sums = [
            [sum((0.9 * lam) ** b * delta[k + b] for b in range(len(r) - k)) for k in range(len(r))] for lam in (policy, critic)
        ]
        advantages[i], returns[i] = sums[0], [a + x for a, x in zip(sums[1], v, strict=True)]
    assert len(lambdas) > 2 or "length_alpha" not in arguments
    outputs = ADVANTAGES.resolve("gae")(inputs, **arguments)
    assert outputs.returns is not None
    same(outputs.advantages, dense(inputs, advantages))
    same(outputs.returns, dense(inputs, returns))


def test_a_long_response_is_estimated_by_blocks_of_columns_with_both_lambdas() -> None:
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(3, 300, generator=generator) < torch.tensor([0.9, 0.5, 0.0])[:, None]
    noise = torch.randn(2, 3, 300, generator=generator, dtype=torch.float64)
    inputs = AdvantageInputs(
        scores=torch.tensor([1.0, -1.0, 3.0], dtype=torch.float64), token_penalty=noise[0], mask=mask,
        groups=torch.zeros(3, dtype=torch.long), values=noise[1], gamma=0.99, normalisation="none",
    )  # fmt: skip
    outputs = ADVANTAGES.resolve("gae")(inputs, critic_lambda=0.95, length_alpha=0.05)
    assert outputs.returns is not None
    for row in range(2):
        at = mask[row].nonzero().squeeze(1).tolist()
        later = {"policy": 0.0, "critic": 0.0, "value": 0.0}
        for place, t in enumerate(reversed(at)):
            value = float(noise[1][row, t])
            delta = float(noise[0][row, t]) + (float(inputs.scores[row]) if place == 0 else 0) + 0.99 * later["value"] - value
            later["policy"] = delta + 0.99 * max(0, 1 - 1 / (0.05 * len(at))) * later["policy"]
            later["critic"] = delta + 0.99 * 0.95 * later["critic"]
            later["value"] = value
            assert float(outputs.advantages[row, t]) == pytest.approx(later["policy"], rel=1e-10, abs=1e-12)
            assert float(outputs.returns[row, t]) == pytest.approx(later["critic"] + value, rel=1e-10, abs=1e-12)
    assert not outputs.advantages[2].any()
    assert not outputs.returns[2].any()


def test_gae_with_lambda_and_gamma_one_is_the_return_less_the_value() -> None:
    inputs = batch(gamma=1.0, lam=1.0)
    assert inputs.values is not None
    outputs = ADVANTAGES.resolve("gae")(inputs)
    assert outputs.returns is not None
    same(outputs.returns, constant(inputs, inputs.scores.tolist()))


def test_gae_does_not_see_tool_tokens() -> None:
    """Removing the masked tokens from the sequence altogether changes nothing at the others."""
    inputs = batch(penalty=True, normalisation="none")
    assert inputs.values is not None
    outputs = ADVANTAGES.resolve("gae")(inputs)
    for i in range(B):
        at = inputs.mask[i]
        alone = ADVANTAGES.resolve("gae")(
            AdvantageInputs(
                scores=inputs.scores[i : i + 1],
                token_penalty=inputs.token_penalty[i][at][None],
                mask=torch.ones(1, int(at.sum()), dtype=torch.bool),
                groups=torch.zeros(1, dtype=torch.long),
                values=inputs.values[i][at][None],
                gamma=0.9,
                lam=0.8,
                normalisation="none",
            )
        )
        same(outputs.advantages[i][at], alone.advantages[0])


@pytest.mark.parametrize("seed", range(3))
def test_reinforce_is_the_discounted_reward_to_go(seed: int) -> None:
    inputs = batch(seed, penalty=True)
    want = {}
    for i in range(B):
        r = rewards_of(inputs, i)
        want[i] = [sum(0.9**k * r[t + k] for k in range(len(r) - t)) for t in range(len(r))]
    same(ADVANTAGES.resolve("reinforce")(inputs).advantages, dense(inputs, want))


def test_the_moving_baseline_is_the_mean_of_all_earlier_rewards() -> None:
    state, earlier = RunningMean(), []
    for seed in range(4):
        inputs = batch(seed, penalty=True, baseline=state)
        totals = [sum(rewards_of(inputs, i)) for i in range(B)]
        baseline = statistics.fmean(earlier) if earlier else 0.0
        outputs = ADVANTAGES.resolve("reinforce_moving_baseline")(inputs)
        same(outputs.advantages, constant(inputs, [r - baseline for r in totals]))
        assert outputs.baseline is not None
        state = RunningMean(**dataclasses.asdict(outputs.baseline))  # as a checkpoint would
        earlier += totals
    assert state.count == 4 * B
    assert state.mean == pytest.approx(statistics.fmean(earlier), rel=1e-12)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_is_the_score_and_the_penalty_to_come_whitened_over_all_tokens(name: str, unbiased: bool) -> None:
    gamma = 0.9 if name == "reinforce_plus_plus" else 1.0  # the other does not read it
    inputs = batch(1, penalty=True, unbiased=unbiased, eps=0.01, gamma=0.9)
    rows = {}
    for i in range(B):
        score = float(inputs.scores[i]) - (statistics.fmean(group_of(inputs, i)) if name.endswith("baseline") else 0.0)
        penalty = [float(inputs.token_penalty[i, t]) for t in places(inputs, i)]
        rewards = [*penalty[:-1], penalty[-1] + score]
        rows[i] = [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]
    same(resolved(name)(inputs).advantages, dense(inputs, plain_whiten(rows, unbiased, 0.01)))


def test_remax_subtracts_the_greedy_score_at_every_token() -> None:
    greedy = torch.linspace(0, 1, B, dtype=torch.float64)
    inputs = batch(greedy_scores=greedy)
    want = [float(r - g) for r, g in zip(inputs.scores, greedy, strict=True)]
    same(ADVANTAGES.resolve("remax")(inputs).advantages, constant(inputs, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_equal_scores_give_exactly_zero(name: str, dtype: torch.dtype) -> None:
    scores = torch.full((B,), 0.1, dtype=dtype)  # 0.1 + 0.1 + 0.1 divided by 3 is not 0.1
    outputs = resolved(name)(batch(scores=scores, eps=0.0, gamma=1.0))
    assert outputs.advantages.dtype == dtype
    assert bool((outputs.advantages == 0).all())


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(B)), seed=st.integers(0, 99))
def test_advantages_do_not_depend_on_the_order_of_the_responses(name: str, order: list[int], seed: int) -> None:
    extra = {"baseline": RunningMean(3, 0.5), "greedy_scores": torch.linspace(0, 1, B, dtype=torch.float64)}
    inputs = batch(seed, penalty=name in WITH_PENALTY, **extra)
    shuffled = rows_of(inputs, list(order))
    outputs = resolved(name)(inputs)
    assert bool((outputs.advantages[~inputs.mask] == 0).all())
    same(resolved(name)(shuffled).advantages, outputs.advantages[order])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_batch_in_which_nothing_was_sampled_has_no_advantages(name: str) -> None:
    extra = {"baseline": RunningMean(3, 0.5), "greedy_scores": torch.zeros(B), "mask": torch.zeros(B, T, dtype=torch.bool)}
    for changes in (extra, extra | {"mask": torch.zeros(B, 0, dtype=torch.bool), "token_penalty": torch.zeros(B, 0),
                                    "values": torch.zeros(B, 0),
                                    "step_rewards": torch.zeros(B, 0), "step_ends": torch.zeros(B, 0).bool(),
                                    "turns": torch.zeros(B, 0).long(), "turn_rewards": torch.zeros(B, 0),
                                    "states": torch.zeros(B, 0).long()}):  # fmt: skip
        outputs = resolved(name)(batch(**changes))
        assert outputs.advantages.shape == changes["mask"].shape
        assert not outputs.advantages.any()
        assert outputs.baseline in (None, RunningMean(3, 0.5))


@pytest.mark.parametrize(
    ("name", "changes", "missing"),
    [
        ("gae", {"values": None}, "values"),
        ("gae", {"bootstrap_truncated": True}, "bootstrap_values"),
        ("reinforce_moving_baseline", {}, "baseline"),
        ("remax", {}, "greedy_scores"),
    ],
)
def test_what_an_estimator_lacks_is_named(name: str, changes: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        resolved(name)(batch(**changes))


def test_the_score_is_at_the_last_sampled_token_and_before_it_only_the_penalty() -> None:
    inputs = batch(penalty=True)
    rewards = token_rewards(inputs.scores, inputs.token_penalty, inputs.mask)
    same(rewards, dense(inputs, {i: rewards_of(inputs, i) for i in range(B)}))
    assert not token_rewards(torch.ones(1), torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.bool)).any()


@pytest.mark.parametrize("unbiased", [True, False])
def test_whitening_uses_the_sampled_tokens_only(unbiased: bool) -> None:
    inputs = batch()
    x = torch.randn(B, T, generator=torch.Generator().manual_seed(5), dtype=torch.float64).masked_fill(
        ~inputs.mask, float("nan")
    )
    rows = {i: [float(x[i, t]) for t in places(inputs, i)] for i in range(B)}
    same(masked_whiten(x, inputs.mask, unbiased=unbiased, eps=0.01), dense(inputs, plain_whiten(rows, unbiased, 0.01)))


def test_whitening_one_token_or_none_is_zero() -> None:
    x = torch.tensor([[3.0, 4.0]])
    for mask in ([[True, False]], [[False, False]]):
        assert masked_whiten(x, torch.tensor(mask), unbiased=True).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("columns", [1, 3, 8])
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_the_block_of_columns_that_is_converted_at_a_time_changes_nothing(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"baseline": RunningMean(3, 0.5), "greedy_scores": torch.linspace(0, 1, B, dtype=torch.float64)}
    inputs = batch(4, penalty=name in WITH_PENALTY, bootstrap_truncated=True, bootstrap_values=torch.arange(B), **extra)
    whole = resolved(name)(inputs)
    monkeypatch.setattr("megarl.algorithms.advantages.COLUMNS", columns)
    in_blocks = resolved(name)(inputs)
    same(in_blocks.advantages, whole.advantages)
    if whole.returns is not None:
        assert in_blocks.returns is not None
        same(in_blocks.returns, whole.returns)


def test_float32_inputs_lose_no_more_than_their_own_rounding_over_thousands_of_tokens() -> None:
    """Sums run in float64: 5,000 rewards of 0.1 and a score of 1000 would drift by 1e-2 in float32."""
    tokens = 5000
    inputs = AdvantageInputs(
        scores=torch.tensor([1000.0]),
        token_penalty=torch.full((1, tokens), 0.1),
        mask=torch.ones(1, tokens, dtype=torch.bool),
        groups=torch.zeros(1, dtype=torch.long),
    )
    got = ADVANTAGES.resolve("reinforce")(inputs).advantages
    want = 1000 + 0.1 * torch.arange(tokens, 0, -1, dtype=torch.float64)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0].double(), want, rtol=1e-7, atol=0)
