"""Advantages (METHODS §3) row by row against plain Python in float64, with tool tokens, uneven, shuffled and tied groups."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import ADVANTAGES, AdvantageInputs, RunningMean, masked_whiten, token_rewards
from megarl.errors import ConfigError

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
WITHOUT_PENALTY = (*GROUP_ESTIMATORS, "grpo_process", "opo", "gpg", "pass_at_k")
B, T = 9, 8


def batch(seed: int = 0, *, penalty: bool = False, **changes: Any) -> AdvantageInputs:
    """Nine responses in shuffled groups of 4, 3 and 2 members, with tool tokens in the middle and ragged ends."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, T + 1, (B,), generator=generator)
    mask = torch.arange(T) < lengths[:, None]
    mask &= torch.rand(B, T, generator=generator) < 0.7
    mask[:, 0] = True
    groups = torch.tensor([70, 5, 70, 5, 12, 70, 12, 70, 5])[torch.randperm(B, generator=generator)]
    noise = torch.randn(3, B, T, generator=generator, dtype=torch.float64)
    ends = mask & (torch.rand(B, T, generator=generator) < 0.4)
    inputs = AdvantageInputs(
        scores=torch.randn(B, generator=generator, dtype=torch.float64),
        token_penalty=-0.1 * noise[0] if penalty else torch.zeros(B, T, dtype=torch.float64),
        mask=mask,
        groups=groups,
        values=noise[1].masked_fill(~mask, float("nan")),  # what is masked must not be read
        truncated=torch.rand(B, generator=generator) < 0.5,
        gamma=0.9,
        lam=0.8,
        step_rewards=noise[2].masked_fill(~ends, float("nan")),
        step_ends=ends,
        pass_k=2,
    )
    return dataclasses.replace(inputs, **changes)


def places(inputs: AdvantageInputs, row: int) -> list[int]:
    return [t for t in range(inputs.mask.shape[1]) if inputs.mask[row, t]]


def dense(inputs: AdvantageInputs, rows: dict[int, list[float]]) -> Tensor:
    """`rows[i][k]` at the k-th sampled token of row i, 0 elsewhere."""
    out = torch.zeros(inputs.mask.shape, dtype=torch.float64)
    for row, values in rows.items():
        for t, value in zip(places(inputs, row), values, strict=True):
            out[row, t] = value
    return out


def constant(inputs: AdvantageInputs, per_response: list[float]) -> Tensor:
    return dense(inputs, {i: [a] * len(places(inputs, i)) for i, a in enumerate(per_response)})


def rewards_of(inputs: AdvantageInputs, row: int) -> list[float]:
    """Rewards at the sampled tokens only: the penalty of each, the score added to the last."""
    rewards = [float(inputs.token_penalty[row, t]) for t in places(inputs, row)]
    if rewards:
        rewards[-1] += float(inputs.scores[row])
    return rewards


def group_of(inputs: AdvantageInputs, row: int) -> list[float]:
    return [float(s) for s, g in zip(inputs.scores, inputs.groups, strict=True) if g == inputs.groups[row]]


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def plain_whiten(rows: dict[int, list[float]], unbiased: bool, eps: float) -> dict[int, list[float]]:
    everything = [x for row in rows.values() for x in row]
    mean = statistics.fmean(everything)
    std = statistics.stdev(everything) if unbiased else statistics.pstdev(everything)
    return {i: [(x - mean) / (std + eps) for x in row] for i, row in rows.items()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bootstrap", [False, True])
def test_gae_is_the_sum_of_discounted_errors_over_sampled_tokens(seed: int, bootstrap: bool) -> None:
    after = torch.linspace(-1, 1, B, dtype=torch.float64)
    inputs = batch(seed, penalty=True, bootstrap_truncated=bootstrap, bootstrap_values=after)
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


def test_gae_with_lambda_and_gamma_one_is_the_return_less_the_value() -> None:
    inputs = batch(gamma=1.0, lam=1.0)
    assert inputs.values is not None
    outputs = ADVANTAGES.resolve("gae")(inputs)
    assert outputs.returns is not None
    same(outputs.returns, constant(inputs, inputs.scores.tolist()))


def test_gae_does_not_see_tool_tokens() -> None:
    """Removing the masked tokens from the sequence altogether changes nothing at the others."""
    inputs = batch(penalty=True)
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
    inputs = batch(1, penalty=True, unbiased=unbiased, eps=0.01)
    rows = {}
    for i in range(B):
        score = float(inputs.scores[i]) - (statistics.fmean(group_of(inputs, i)) if name.endswith("baseline") else 0.0)
        penalty = [float(inputs.token_penalty[i, t]) for t in places(inputs, i)]
        rows[i] = [score + sum(penalty[k:]) for k in range(len(penalty))]
    same(ADVANTAGES.resolve(name)(inputs).advantages, dense(inputs, plain_whiten(rows, unbiased, 0.01)))


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_group_estimators_compare_within_shuffled_uneven_groups(name: str, seed: int, unbiased: bool) -> None:
    inputs = batch(seed, unbiased=unbiased, eps=0.01)
    want = []
    for i in range(B):
        r, group = float(inputs.scores[i]), group_of(inputs, i)
        if name == "grpo":
            std = statistics.stdev(group) if unbiased else statistics.pstdev(group)
            want.append((r - statistics.fmean(group)) / (std + 0.01))
        elif name == "dr_grpo":
            want.append(r - statistics.fmean(group))
        else:
            want.append(r - (sum(group) - r) / (len(group) - 1))
    outputs = ADVANTAGES.resolve(name)(inputs)
    same(outputs.advantages, constant(inputs, want))
    assert outputs.dropped is not None
    assert not outputs.dropped.any()


def test_remax_subtracts_the_greedy_score_at_every_token() -> None:
    greedy = torch.linspace(0, 1, B, dtype=torch.float64)
    inputs = batch(greedy_scores=greedy)
    want = [float(r - g) for r, g in zip(inputs.scores, greedy, strict=True)]
    same(ADVANTAGES.resolve("remax")(inputs).advantages, constant(inputs, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_equal_scores_give_exactly_zero(name: str, dtype: torch.dtype) -> None:
    scores = torch.full((B,), 0.1, dtype=dtype)  # 0.1 + 0.1 + 0.1 divided by 3 is not 0.1
    outputs = ADVANTAGES.resolve(name)(batch(scores=scores, eps=0.0))
    assert outputs.advantages.dtype == dtype
    assert bool((outputs.advantages == 0).all())


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "reinforce_plus_plus_baseline"])
def test_a_group_of_one_is_zero_dropped_and_invisible_to_the_others(name: str) -> None:
    inputs = batch(2, penalty=name.endswith("baseline"))
    groups = inputs.groups.clone()
    groups[4] = 999
    with_lone = dataclasses.replace(inputs, groups=groups)
    outputs = ADVANTAGES.resolve(name)(with_lone)
    assert outputs.dropped is not None
    assert outputs.dropped.tolist() == [i == 4 for i in range(B)]
    assert bool((outputs.advantages[4] == 0).all())
    mask = inputs.mask.clone()
    mask[4] = False
    others = ADVANTAGES.resolve(name)(dataclasses.replace(with_lone, mask=mask))
    assert others.dropped is not None
    assert not others.dropped.any()
    same(outputs.advantages, others.advantages)


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "reinforce_plus_plus_baseline"])
def test_a_response_without_sampled_tokens_counts_in_no_group_mean(name: str) -> None:
    inputs = batch(3)
    inputs.mask[0] = False
    inputs.scores[0] = 1e6
    got = ADVANTAGES.resolve(name)(inputs).advantages
    rest = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    rest = {k: v[1:] if isinstance(v, Tensor) else v for k, v in rest.items()}
    assert not got[0].any()
    same(got[1:], ADVANTAGES.resolve(name)(AdvantageInputs(**rest)).advantages)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(B)), seed=st.integers(0, 99))
def test_advantages_do_not_depend_on_the_order_of_the_responses(name: str, order: list[int], seed: int) -> None:
    extra = {"baseline": RunningMean(3, 0.5), "greedy_scores": torch.linspace(0, 1, B, dtype=torch.float64)}
    inputs = batch(seed, penalty=name not in WITHOUT_PENALTY, **extra)
    if name == "pass_at_k":
        inputs.scores = (inputs.scores > 0).double()
    fields = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    shuffled = AdvantageInputs(**{k: v[order] if isinstance(v, Tensor) else v for k, v in fields.items()})
    outputs = ADVANTAGES.resolve(name)(inputs)
    assert bool((outputs.advantages[~inputs.mask] == 0).all())
    same(ADVANTAGES.resolve(name)(shuffled).advantages, outputs.advantages[order])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_batch_in_which_nothing_was_sampled_has_no_advantages(name: str) -> None:
    extra = {"baseline": RunningMean(3, 0.5), "greedy_scores": torch.zeros(B), "mask": torch.zeros(B, T, dtype=torch.bool)}
    for changes in (extra, extra | {"mask": torch.zeros(B, 0, dtype=torch.bool), "token_penalty": torch.zeros(B, 0),
                                    "values": torch.zeros(B, 0),
                                    "step_rewards": torch.zeros(B, 0), "step_ends": torch.zeros(B, 0).bool()}):  # fmt: skip
        outputs = ADVANTAGES.resolve(name)(batch(**changes))
        assert outputs.advantages.shape == changes["mask"].shape
        assert not outputs.advantages.any()
        assert outputs.baseline in (None, RunningMean(3, 0.5))


@pytest.mark.parametrize("name", WITHOUT_PENALTY)
def test_a_penalty_in_the_reward_is_refused_where_it_would_be_ignored(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.*put it in the loss"):
        ADVANTAGES.resolve(name)(batch(penalty=True))


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
        ADVANTAGES.resolve(name)(batch(**changes))


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
    same(masked_whiten(x, inputs.mask, unbiased, eps=0.01), dense(inputs, plain_whiten(rows, unbiased, 0.01)))


def test_whitening_one_token_or_none_is_zero() -> None:
    x = torch.tensor([[3.0, 4.0]])
    for mask in ([[True, False]], [[False, False]]):
        assert masked_whiten(x, torch.tensor(mask), unbiased=True).tolist() == [[0.0, 0.0]]
