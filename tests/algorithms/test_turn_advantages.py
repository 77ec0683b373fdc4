"""Credit to turns against plain Python in float64: own and later rewards, discounted by turn, less those of others.

Formulas and sources: docs/methods.md#advantages.
"""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch

from megarl.algorithms import ADVANTAGES, AdvantageInputs, rewards_of_turns, turn_numbers
from megarl.errors import ConfigError
from tests.algorithms.batches import B, T, batch, dense, places, same

GROUPS = torch.tensor([8, 2, 2, 5, 8, 5, 8, 5, 8])
"""Where row 3 has nothing sampled: groups of 4, 2 and 2."""


def returns_of(inputs: AdvantageInputs) -> list[list[float]]:
    """Σ_{v≥u} γ^(v−u) r_v of each turn u of each response; r_v has the penalties of the turn's tokens."""
    assert inputs.turn_rewards is not None
    found = []
    for i in range(B):
        turns = turns_of(inputs, i)
        rewards = [sum(float(inputs.turn_rewards[i, t] + inputs.token_penalty[i, t]) for t in turn) for turn in turns]
        found.append([sum(inputs.gamma ** (v - u) * rewards[v] for v in range(u, len(rewards))) for u in range(len(rewards))])
    return found


def turns_of(inputs: AdvantageInputs, row: int) -> list[list[int]]:
    """Columns of the tokens of each turn: runs of sampled tokens."""
    turns: list[list[int]] = []
    for t in places(inputs, row):
        if turns and turns[-1][-1] == t - 1:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def at_tokens(inputs: AdvantageInputs, of_turns: dict[int, list[float]]) -> torch.Tensor:
    rows = {
        i: [value for turn, value in zip(turns_of(inputs, i), values, strict=True) for _ in turn]
        for i, values in of_turns.items()
    }
    return dense(inputs, rows)


def peers(inputs: AdvantageInputs, row: int) -> list[int]:
    return [j for j in range(B) if inputs.groups[j] == inputs.groups[row] and inputs.mask[j].any()]


def standardised(value: float, values: list[float], *, unbiased: bool, eps: float) -> float:
    if len({*values}) == 1:
        return 0.0
    spread = statistics.stdev(values) if unbiased else statistics.pstdev(values)
    return (value - statistics.fmean(values)) / (spread + eps)


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_turn_is_compared_with_the_same_turn_of_the_others(seed: int, penalty: bool) -> None:
    inputs = batch(seed, penalty=penalty, groups=GROUPS)
    inputs.mask[3] = False
    returns, want = returns_of(inputs), {}
    for i in range(B):
        others = [j for j in peers(inputs, i) if j != i]
        baselines = [statistics.fmean(returns[j][min(u, len(returns[j]) - 1)] for j in others) for u in range(len(returns[i]))]
        want[i] = [own - baseline for own, baseline in zip(returns[i], baselines, strict=True)]
    same(ADVANTAGES.resolve("turn_rloo")(inputs).advantages, at_tokens(inputs, want))


def test_with_one_reward_at_the_end_and_no_discount_turns_are_compared_as_responses_are() -> None:
    inputs = batch(1, gamma=1.0)
    assert inputs.turns is not None
    at_the_end = rewards_of_turns(inputs.scores, inputs.turns, [[]] * B)
    inputs = dataclasses.replace(inputs, turn_rewards=at_the_end)
    same(ADVANTAGES.resolve("turn_rloo")(inputs).advantages, ADVANTAGES.resolve("rloo")(inputs).advantages)


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_gigpo_adds_the_advantage_among_the_turns_of_one_state(seed: int, unbiased: bool, divide_by_std: bool) -> None:
    inputs = batch(seed, penalty=True, unbiased=unbiased, eps=0.01, groups=GROUPS)
    inputs.mask[3] = False
    assert inputs.states is not None
    assert inputs.turn_rewards is not None
    returns, want = returns_of(inputs), {}
    whole = [sum(float(inputs.turn_rewards[i, t] + inputs.token_penalty[i, t]) for t in places(inputs, i)) for i in range(B)]
    visits: dict[tuple[int, int], list[float]] = {}
    keys = {i: [(int(inputs.groups[i]), int(inputs.states[i, turn[0]])) for turn in turns_of(inputs, i)] for i in range(B)}
    for i in range(B):
        for key, value in zip(keys[i], returns[i], strict=True):
            visits.setdefault(key, []).append(value)

    def relative(value: float, values: list[float]) -> float:
        if divide_by_std:
            return standardised(value, values, unbiased=unbiased, eps=0.01)
        return value - statistics.fmean(values)

    for i in range(B):
        episode = relative(whole[i], [whole[j] for j in peers(inputs, i)]) if places(inputs, i) else 0.0
        steps = [relative(value, visits[key]) for key, value in zip(keys[i], returns[i], strict=True)]
        want[i] = [episode + 0.7 * step for step in steps]
    arguments = {"step_weight": 0.7, "divide_by_std": divide_by_std}
    same(ADVANTAGES.resolve("gigpo")(inputs, **arguments).advantages, at_tokens(inputs, want))
    assert max(map(len, visits.values())) > 1


def test_without_its_step_part_gigpo_is_grpo() -> None:
    inputs = batch(2, penalty=True)
    same(ADVANTAGES.resolve("gigpo")(inputs, step_weight=0).advantages, ADVANTAGES.resolve("grpo")(inputs).advantages)
    centred = ADVANTAGES.resolve("gigpo")(inputs, step_weight=0, divide_by_std=False).advantages
    same(centred, ADVANTAGES.resolve("dr_grpo")(inputs).advantages)


def test_a_state_that_one_turn_alone_was_taken_in_adds_nothing() -> None:
    inputs = batch(3)
    assert inputs.turns is not None
    alone = torch.where(inputs.mask, inputs.turns + 100 * torch.arange(B)[:, None], -1)
    inputs = dataclasses.replace(inputs, states=alone)
    same(ADVANTAGES.resolve("gigpo")(inputs).advantages, ADVANTAGES.resolve("grpo")(inputs).advantages)


def test_the_same_state_of_another_prompt_is_another_state() -> None:
    inputs = batch(3)
    renamed = dataclasses.replace(inputs, states=torch.where(inputs.mask, inputs.states + 10 * inputs.groups[:, None], -1))  # type: ignore[operator]
    same(ADVANTAGES.resolve("gigpo")(inputs).advantages, ADVANTAGES.resolve("gigpo")(renamed).advantages)


def test_a_turn_whose_state_nobody_named_is_one_sentence() -> None:
    inputs = batch(0)
    assert inputs.states is not None
    inputs.states[2] = -1
    with pytest.raises(ConfigError, match="needs the state before each turn, which an episode did not name"):
        ADVANTAGES.resolve("gigpo")(inputs)


def test_rewards_of_turns_stand_at_their_last_tokens_and_sum_to_the_score() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]]).bool()
    scores = torch.tensor([2.0, 3.0, 4.0, 5.0])
    got = rewards_of_turns(scores, turn_numbers(mask), [[0.5, 0.25, 9.0], [], [], [1.0]])
    assert got.tolist() == [[0, 0.5, 0, 0.25, 0, 1.25], [0, 0, 3, 0, 0, 0], [0] * 6, [1, 0, 4, 0, 0, 0]]
    assert rewards_of_turns(torch.ones(1), torch.zeros(1, 0).long(), [[]]).shape == (1, 0)
    whole = batch(5)
    assert whole.turn_rewards is not None
    same(whole.turn_rewards.sum(1), whole.scores)
    assert bool((whole.turn_rewards[:, :T] != 0).sum() > B)
