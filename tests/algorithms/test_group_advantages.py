"""Group estimators row by row against plain Python in float64, in shuffled, uneven, incomplete and tied groups.

Formulas and sources: docs/methods.md#advantages.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import ADVANTAGES, AdvantageInputs
from tests.algorithms.batches import ARGUMENTS, B, T, batch, constant, dense, enriched, places, resolved, rows_of, same

OUTCOME = ("grpo", "dr_grpo", "rloo", "opo", "gpg")
BY_TURN = ("turn_rloo", "gigpo")
GROUPED = (
    *OUTCOME, "grpo_process", "reinforce_plus_plus_baseline", "gdpo", "pass_at_k", "optimal_token_baseline", *BY_TURN
)  # fmt: skip
TOO_SMALL = {name: ARGUMENTS[name]["k"] if name in ARGUMENTS else 1 for name in GROUPED}
"""The largest group that is dropped."""


def members(inputs: AdvantageInputs, row: int) -> list[int]:
    """Rows of the group of `row` that have sampled tokens."""
    return [i for i in range(len(inputs.groups)) if inputs.groups[i] == inputs.groups[row] and inputs.mask[i].any()]


def std_of(values: list[float], unbiased: bool) -> float:
    return statistics.stdev(values) if unbiased and len(values) > 1 else statistics.pstdev(values)


def plain(name: str, inputs: AdvantageInputs) -> list[float]:
    """The advantage of each response by the table's rule; groups have at least two members."""
    want = []
    sampled = [i for i in range(len(inputs.scores)) if inputs.mask[i].any()]
    tied = {i for i in sampled if len({float(inputs.scores[j]) for j in members(inputs, i)}) == 1}
    for i in range(len(inputs.scores)):
        rows = members(inputs, i)
        if i not in rows or i in tied:
            want.append(0.0)
            continue
        r, group = float(inputs.scores[i]), [float(inputs.scores[j]) for j in rows]
        mean = statistics.fmean(group)
        lengths = [len(places(inputs, j)) for j in rows]
        want.append(
            {
                "grpo": lambda r=r, g=group, m=mean: (r - m) / (std_of(g, inputs.unbiased) + inputs.eps),
                "dr_grpo": lambda r=r, m=mean: r - m,
                "rloo": lambda r=r, g=group: r - (sum(g) - r) / (len(g) - 1),
                "opo": lambda r=r, g=group, n=lengths: r - sum(a * b for a, b in zip(n, g, strict=True)) / sum(n),
                "gpg": lambda r=r, m=mean: len(sampled) / (len(sampled) - len(tied)) * (r - m),
            }[name]()
        )
    return want


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", OUTCOME)
def test_every_outcome_estimator_is_its_row_of_methods(name: str, seed: int, unbiased: bool) -> None:
    inputs = batch(seed, unbiased=unbiased, eps=0.01)
    outputs = resolved(name)(inputs)
    same(outputs.advantages, constant(inputs, plain(name, inputs)))
    assert outputs.dropped is not None
    assert not outputs.dropped.any()


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_process_grpo_sums_the_normalised_rewards_of_the_steps_that_end_here_or_later(seed: int, unbiased: bool) -> None:
    inputs = batch(seed, unbiased=unbiased, eps=0.01)
    assert inputs.step_rewards is not None
    assert inputs.step_ends is not None
    steps = {i: [t for t in places(inputs, i) if inputs.step_ends[i, t]] for i in range(B)}
    rewards = {i: [float(inputs.step_rewards[i, t]) for t in steps[i]] for i in range(B)}
    want = {}
    for i in range(B):
        everything = [r for j in members(inputs, i) for r in rewards[j]]
        mean, std = statistics.fmean(everything), std_of(everything, unbiased)
        normalised = {t: (r - mean) / (std + 0.01) for t, r in zip(steps[i], rewards[i], strict=True)}
        want[i] = [sum(r for end, r in normalised.items() if end >= t) for t in places(inputs, i)]
    outputs = ADVANTAGES.resolve("grpo_process")(inputs)
    same(outputs.advantages, dense(inputs, want))
    assert bool((outputs.advantages.max(1).values != outputs.advantages.min(1).values).any())


def test_one_step_at_the_end_of_each_response_makes_the_process_form_the_outcome_form() -> None:
    inputs = batch(1)
    ends, rewards = torch.zeros(B, T, dtype=torch.bool), torch.zeros(B, T, dtype=torch.float64)
    for i in range(B):
        ends[i, places(inputs, i)[-1]] = True
        rewards[i, places(inputs, i)[-1]] = inputs.scores[i]
    process = ADVANTAGES.resolve("grpo_process")(dataclasses.replace(inputs, step_ends=ends, step_rewards=rewards))
    same(process.advantages, ADVANTAGES.resolve("grpo")(inputs).advantages)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_gdpo_normalises_each_source_in_its_group_and_their_weighted_sum_over_the_batch(seed: int, unbiased: bool) -> None:
    inputs = batch(seed, unbiased=unbiased, eps=0.01, groups=torch.tensor([8, 2, 2, 5, 8, 5, 8, 5, 8]))
    inputs.mask[3] = False
    rows = [i for i in range(B) if i != 3]
    sums = dict.fromkeys(rows, 0.0)
    for source, weight in inputs.reward_weights.items():
        given = [float(x) for x in inputs.rewards_by_source[source]]
        for i in rows:
            group = [given[j] for j in members(inputs, i)]
            spread = std_of(group, unbiased)
            sums[i] += weight * (given[i] - statistics.fmean(group)) / (spread + 0.01) if len({*group}) > 1 else 0.0
    mean, spread = statistics.fmean(sums.values()), std_of([*sums.values()], unbiased)
    want = [(sums[i] - mean) / (spread + 0.01) if i in sums else 0.0 for i in range(B)]
    same(resolved("gdpo")(inputs).advantages, constant(inputs, want))
    untouched = dataclasses.replace(inputs, scores=torch.full((B,), 1e6, dtype=torch.float64))
    same(resolved("gdpo")(untouched).advantages, constant(inputs, want))


def test_gdpo_tells_combinations_of_rewards_apart_whose_sums_are_equal() -> None:
    """(1, 0) and (0, 1) have one sum; of the source that fewer responses satisfy, the normalised reward is larger."""
    sources = {"a": torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0, 1]), "b": torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 0, 0])}
    inputs = batch(
        groups=torch.zeros(B, dtype=torch.long), scores=sources["a"] + sources["b"], rewards_by_source=sources,
        reward_weights={"a": 1.0, "b": 1.0}, token_penalty=torch.zeros(B, T),
    )  # fmt: skip
    by_source, by_sum = (resolved(name)(inputs).advantages[:, 0] for name in ("gdpo", "grpo"))
    assert by_sum[0] == by_sum[1]
    assert by_source[0] > by_source[1] + 0.3


def test_opo_has_the_baseline_of_least_variance_for_gradients_that_grow_with_length() -> None:
    """Σ|o|·(r − b)² is least at OPO's b, so it is less than at the plain mean."""
    inputs = batch(0, groups=torch.zeros(B, dtype=torch.long))
    lengths = inputs.mask.sum(1)
    opo, mean = (resolved(name)(inputs).advantages.sum(1) / lengths for name in ("opo", "dr_grpo"))
    assert abs((lengths * opo).sum()) < 1e-12
    assert (lengths * opo**2).sum() < (lengths * mean**2).sum()


def test_gpg_keeps_the_mean_gradient_of_the_groups_that_have_one() -> None:
    """Tied groups stay in the denominator; α makes up for them exactly."""
    inputs = batch(3)
    live = inputs.groups == 70
    inputs.scores[~live] = 0.5
    advantages = ADVANTAGES.resolve("gpg")(inputs).advantages[:, 0]
    alone = ADVANTAGES.resolve("dr_grpo")(rows_of(inputs, live)).advantages[:, 0]
    same(advantages.abs().mean(), alone.abs().mean())
    assert not advantages[~live].any()
    inputs.scores[:] = 0.5
    assert not ADVANTAGES.resolve("gpg")(inputs).advantages.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in GROUPED if name not in BY_TURN])
def test_equal_rewards_give_exactly_zero(name: str, dtype: torch.dtype) -> None:
    value = 0.1  # 0.1 + 0.1 + 0.1 divided by 3 is not 0.1
    equal: dict[str, Any] = {
        "scores": torch.full((B,), value, dtype=dtype),
        "step_rewards": torch.full((B, T), value, dtype=dtype),
        "rewards_by_source": dict.fromkeys("ab", torch.full((B,), value, dtype=dtype)),
    }
    outputs = resolved(name)(batch(**equal, eps=0.0))
    assert outputs.advantages.dtype == dtype
    assert bool((outputs.advantages == 0).all())


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_is_zero_dropped_and_invisible_to_the_others(name: str) -> None:
    inputs = batch(2, penalty=True, groups=torch.tensor([0, 0, 0, 0, 999, 1, 1, 1, 1]))
    outputs = resolved(name)(inputs)
    assert outputs.dropped is not None
    assert outputs.dropped.tolist() == [i == 4 for i in range(B)]
    assert bool((outputs.advantages[4] == 0).all())
    rest = [i for i in range(B) if i != 4]
    others = resolved(name)(rows_of(inputs, rest))
    assert others.dropped is not None
    assert not others.dropped.any()
    same(outputs.advantages[rest], others.advantages)


@pytest.mark.parametrize("name", GROUPED)
def test_a_response_without_sampled_tokens_counts_in_no_statistic(name: str) -> None:
    inputs = batch(3)
    inputs.mask[0] = False
    inputs.scores[0] = 1e6
    got = resolved(name)(inputs).advantages
    assert not got[0].any()
    same(got[1:], resolved(name)(rows_of(inputs, list(range(1, B)))).advantages)


def random_groups(groups: list[int], scores: list[int], seed: int) -> AdvantageInputs:
    """Responses in `groups` with whole-number scores, so that ties happen; some without sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = len(groups)
    mask = torch.rand(size, 4, generator=generator) < 0.6
    inputs = AdvantageInputs(
        scores=torch.tensor(scores, dtype=torch.float64),
        token_penalty=torch.zeros(size, 4, dtype=torch.float64),
        mask=mask,
        groups=torch.tensor(groups),
        step_rewards=torch.randint(-1, 2, (size, 4), generator=generator).double(),
        step_ends=torch.rand(size, 4, generator=generator) < 0.6,
        gamma=0.9,
    )
    return enriched(inputs, seed)


MANY_GROUPS = st.integers(1, 12).flatmap(
    lambda size: st.tuples(
        st.lists(st.sampled_from([3, 7, -1, 10**12]), min_size=size, max_size=size),
        st.lists(st.integers(0, 1), min_size=size, max_size=size),
        st.permutations(range(size)),
        st.integers(0, 999),
    )
)


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=60, deadline=None)
@given(drawn=MANY_GROUPS)
def test_any_mixture_of_groups_is_handled_group_by_group(name: str, drawn: tuple[list[int], list[int], list[int], int]) -> None:
    groups, scores, order, seed = drawn
    inputs = random_groups(groups, scores, seed)
    outputs = resolved(name)(inputs)
    assert bool(outputs.advantages.isfinite().all())
    assert bool((outputs.advantages[~inputs.mask] == 0).all())
    assert outputs.dropped is not None
    sampled = [i for i in range(len(groups)) if inputs.mask[i].any()]
    assert outputs.dropped.tolist() == [i in sampled and len(members(inputs, i)) <= TOO_SMALL[name] for i in range(len(groups))]
    shuffled = resolved(name)(rows_of(inputs, list(order)))
    same(shuffled.advantages, outputs.advantages[order])
    renamed = resolved(name)(dataclasses.replace(inputs, groups=5 - inputs.groups))
    same(renamed.advantages, outputs.advantages)
    if name in OUTCOME:
        dropped = set(outputs.dropped.nonzero().flatten().tolist())
        mask = inputs.mask & ~outputs.dropped[:, None]
        kept = dataclasses.replace(inputs, mask=mask)
        same(outputs.advantages, constant(inputs, [0.0 if i in dropped else a for i, a in enumerate(plain(name, kept))]))


@pytest.mark.parametrize("name", [n for n in GROUPED if n not in ("gpg", "reinforce_plus_plus_baseline", "gdpo")])
@settings(max_examples=30, deadline=None)
@given(drawn=MANY_GROUPS)
def test_a_group_does_not_see_the_others(name: str, drawn: tuple[list[int], list[int], list[int], int]) -> None:
    """Uneven groups never mix: each group's advantages are those it has in a batch of its own."""
    groups, scores, _, seed = drawn
    inputs = random_groups(groups, scores, seed)
    together = resolved(name)(inputs).advantages
    for group in set(groups):
        rows = [i for i in range(len(groups)) if groups[i] == group]
        same(together[rows], resolved(name)(rows_of(inputs, rows)).advantages)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OUTCOME)
def test_a_penalty_in_the_reward_is_part_of_what_is_compared(name: str, seed: int) -> None:
    """The score of a response plus the penalties of its sampled tokens is the R of the formula."""
    inputs = batch(seed, penalty=True)
    whole = [sum(float(inputs.token_penalty[i, t]) for t in places(inputs, i)) + float(inputs.scores[i]) for i in range(B)]
    folded = dataclasses.replace(
        inputs, scores=torch.tensor(whole, dtype=torch.float64), token_penalty=torch.zeros_like(inputs.token_penalty)
    )
    same(resolved(name)(inputs).advantages, constant(inputs, plain(name, folded)))


def test_a_penalty_in_the_reward_counts_to_the_step_that_it_is_in() -> None:
    inputs = batch(1, penalty=True)
    assert inputs.step_rewards is not None
    assert inputs.step_ends is not None
    folded = inputs.step_rewards.clone()
    for i in range(B):
        spent = 0.0
        for t in places(inputs, i):
            spent += float(inputs.token_penalty[i, t])
            if inputs.step_ends[i, t]:
                folded[i, t] += spent
                spent = 0.0
    without = dataclasses.replace(inputs, step_rewards=folded, token_penalty=torch.zeros_like(inputs.token_penalty))
    got = ADVANTAGES.resolve("grpo_process")(inputs).advantages
    same(got, ADVANTAGES.resolve("grpo_process")(without).advantages)
    assert not torch.equal(got, ADVANTAGES.resolve("grpo_process")(batch(1)).advantages)


@pytest.mark.parametrize(
    ("name", "changes", "missing"),
    [
        ("grpo_process", {"step_rewards": None}, "step_rewards"),
        ("grpo_process", {"step_ends": None}, "step_ends"),
        ("gdpo", {"reward_weights": {}}, "reward_weights"),
        ("gdpo", {"rewards_by_source": {"a": torch.zeros(B)}}, "rewards_by_source"),
        ("optimal_token_baseline", {"old_log_probs": None}, "old_log_probs"),
        ("optimal_token_baseline", {"collision": None}, "collision"),
        ("turn_rloo", {"turns": None}, "turns"),
        ("turn_rloo", {"turn_rewards": None}, "turn_rewards"),
        ("gigpo", {"turn_rewards": None}, "turn_rewards"),
        ("gigpo", {"states": None}, "states"),
    ],
)
def test_what_a_group_estimator_lacks_is_named(name: str, changes: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        resolved(name)(batch(**changes))


def test_group_statistics_are_exact_for_scores_far_from_zero() -> None:
    scores = torch.tensor([1e8, 1e8 + 1, 1e8 + 2] * 3, dtype=torch.float64)
    groups = torch.arange(B) // 3
    shifted: Tensor = ADVANTAGES.resolve("grpo")(batch(scores=scores, groups=groups)).advantages
    same(shifted, ADVANTAGES.resolve("grpo")(batch(scores=scores - 1e8, groups=groups)).advantages)
