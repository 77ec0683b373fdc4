"""Advantages of turns: each turn of an episode is credited with its own reward and those of later turns.

Formulas and sources: docs/methods.md#advantages. Tables are `[B, U]`: a column for each of the U turns of the longest episode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOutputs, estimator
from megarl.algorithms.group_statistics import GroupStatistics, response_statistics
from megarl.errors import ConfigError


def rewards_of_turns(scores: Tensor, turns: Tensor, given: Sequence[Sequence[float]]) -> Tensor:
    """The reward of each turn at its last sampled token, float `[B, T]` in the dtype of `scores`, 0 elsewhere.

    Args:
        scores: float `[B]`: reward of each response.
        turns: int64 `[B, T]`: the turn of each sampled token, from 0; −1 elsewhere.
        given: of each response, what its turns were given by themselves; none: nothing. What the score has beyond their sum
            is the last turn's, so that a row's sum is its score.
    """
    following = torch.cat([turns[:, 1:], turns.new_full((len(turns), 1), -1)], 1)[:, : turns.shape[1]]
    ends = (turns >= 0) & (turns != following)
    rewards = torch.zeros(turns.shape, dtype=scores.dtype)
    for row, (score, of_turns) in enumerate(zip(scores.tolist(), given, strict=True)):
        places = ends[row].nonzero().squeeze(1)
        if len(places):
            earlier = [*of_turns[: len(places) - 1], *[0.0] * (len(places) - 1 - len(of_turns))]
            rewards[row, places] = torch.tensor([*earlier, score - sum(earlier)], dtype=scores.dtype)
    return rewards


@estimator("turn_rloo")
def turn_rloo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """G_u − mean over the *other* responses of the group of theirs, with G_u = Σ_{v≥u} γ^(v−u) r_v, at the tokens of turn u.

    Of a response that has no turn u it is the return of its last one: with γ = 1 and a reward at the end this is `rloo`. The
    other responses do not depend on this one, so the baseline adds no bias (arXiv 2402.14740, applied to each turn).

    Raises:
        ValueError: `turns` or `turn_rewards` is missing.
    """
    turns, group = _Turns(inputs, "turn_rloo"), response_statistics(inputs)
    last = (turns.number - 1).clamp(min=0)[:, None]
    compared = turns.returns.gather(1, torch.arange(turns.most).minimum(last))
    of_turn = group.index[:, None] * turns.most + torch.arange(turns.most)
    member = inputs.mask.any(1)[:, None].expand(of_turn.shape)
    statistics = GroupStatistics.of(compared.flatten(), of_turn.flatten(), group.count * turns.most, member.flatten())
    less_others = statistics.centred * statistics.size / (statistics.size - 1).clamp(min=1)
    return AdvantageOutputs(advantages=turns.at_tokens(less_others.view(of_turn.shape), inputs), dropped=group.alone)


@estimator("gigpo")
def gigpo(inputs: AdvantageInputs, *, step_weight: float = 1.0, divide_by_std: bool = True) -> AdvantageOutputs:
    """A_episode + step_weight·A_step (arXiv 2505.10978), at the tokens of each turn.

    A_episode is R − mean of the group; A_step is G_u − mean over all turns of the group that were taken in the same state, with
    G_u = Σ_{v≥u} γ^(v−u) r_v, and 0 where no other was. Each is divided by its std + eps if `divide_by_std`.

    Raises:
        ValueError: `turns`, `turn_rewards` or `states` is missing.
        ConfigError: nobody named the state of a turn.
    """
    if inputs.states is None:
        raise ValueError("gigpo needs states, but none were given")
    turns, group = _Turns(inputs, "gigpo"), response_statistics(inputs)
    if bool((inputs.mask & (inputs.states < 0)).any()):
        raise ConfigError(
            "algorithm.advantage = 'gigpo' needs the state before each turn, which an episode did not name: give the "
            "environment a method state_key, or choose another algorithm.advantage"
        )
    state = torch.zeros(turns.returns.shape, dtype=torch.long)
    state.scatter_reduce_(1, turns.of_token.clamp(min=0), torch.where(inputs.mask, inputs.states, 0), "amax")
    kept = turns.exists & ~group.alone[:, None]
    visits = torch.stack([group.index[:, None].expand(state.shape)[kept], state[kept]])
    distinct, index = visits.unique(dim=1, return_inverse=True)
    steps = GroupStatistics.of(turns.returns[kept], index, distinct.shape[1])

    def relative(statistics: GroupStatistics) -> Tensor:
        return statistics.standardised(inputs) if divide_by_std else statistics.centred

    table = relative(group)[:, None].expand(state.shape).clone()
    table[kept] += step_weight * relative(steps)
    return AdvantageOutputs(advantages=turns.at_tokens(table, inputs), dropped=group.alone)


class _Turns:
    """The turns of a batch and their discounted returns."""

    def __init__(self, inputs: AdvantageInputs, name: str) -> None:
        """Raises ValueError where what `name` reads is missing."""
        if inputs.turns is None or inputs.turn_rewards is None:
            raise ValueError(f"{name} needs turns and turn_rewards, but one of them is missing")
        self.of_token = torch.where(inputs.mask, inputs.turns, -1)
        """int64 `[B, T]`, −1 at tokens that were not sampled."""
        self.number = torch.cat([self.of_token, self.of_token.new_full((len(self.of_token), 1), -1)], 1).amax(1) + 1
        """int64 `[B]`: turns of each response."""
        self.most = max(1, int(self.number.max()) if len(self.number) else 0)
        self.exists = torch.arange(self.most) < self.number[:, None]
        """bool `[B, U]`."""
        self.returns = torch.zeros(len(inputs.mask), self.most, dtype=torch.float64)
        """`[B, U]`: Σ_{v≥u} γ^(v−u) r_v, where r_v is the reward of turn v with the penalties of its tokens."""
        rewards = torch.where(inputs.mask, inputs.token_penalty + inputs.turn_rewards, 0).double()
        self.returns.scatter_add_(1, self.of_token.clamp(min=0), rewards)
        for turn in reversed(range(self.most - 1)):
            self.returns[:, turn] += inputs.gamma * self.returns[:, turn + 1]

    def at_tokens(self, table: Tensor, inputs: AdvantageInputs) -> Tensor:
        """`table` `[B, U]` at the sampled tokens of each turn `[B, T]`, in the dtype of the scores."""
        of_tokens = table.to(inputs.scores.dtype).gather(1, self.of_token.clamp(min=0))
        return torch.where(inputs.mask, of_tokens, 0)
