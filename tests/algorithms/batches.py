"""A small batch of responses with everything estimators read, and plain-Python views of it that tests compute with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import ADVANTAGES, AdvantageInputs, AdvantageOutputs, rewards_of_turns, turn_numbers
from megarl.algorithms.catalogue import POLICY_LOSSES

B, T = 9, 8
ARGUMENTS: dict[str, dict[str, Any]] = {"pass_at_k": {"k": 2}}
"""What estimators are given by name."""


def resolved(name: str) -> Callable[[AdvantageInputs], AdvantageOutputs]:
    """The estimator `name` with its arguments."""
    return partial(ADVANTAGES.resolve(name), **ARGUMENTS.get(name, {}))


def enriched(inputs: AdvantageInputs, seed: int) -> AdvantageInputs:
    """`inputs` with two sources of reward, rewards and states of turns, and what a pass of the policy gives.

    A response's source `a` and the rewards of its turns are its score in other words; there are three states.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = inputs.mask.shape
    turns, scores = turn_numbers(inputs.mask), inputs.scores
    given = torch.randint(0, 2, shape, generator=generator).double().tolist()
    states = torch.randint(0, 3, shape, generator=generator)
    log_probs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    others = 1 - log_probs.exp()
    more: dict[str, Any] = {
        "rewards_by_source": {"a": scores, "b": torch.randint(0, 3, (len(scores),), generator=generator).to(scores.dtype)},
        "reward_weights": {"a": 1.0, "b": 0.5},
        "turns": turns,
        "turn_rewards": rewards_of_turns(scores, turns, given),
        "states": torch.where(inputs.mask, states.gather(1, turns.clamp(min=0)), -1) if shape[1] else states,
        "old_log_probs": log_probs.masked_fill(~inputs.mask, float("nan")),
        "collision": (log_probs.exp() ** 2 + others**2 / 4).masked_fill(~inputs.mask, float("nan")),
    }
    return dataclasses.replace(inputs, **more)


def batch(seed: int = 0, *, penalty: bool = False, **changes: Any) -> AdvantageInputs:
    """Nine responses in shuffled groups of 4, 3 and 2 members, with tool tokens in the middle and ragged ends.

    What is masked, or no step end, is NaN where it must not be read.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, T + 1, (B,), generator=generator)
    mask = torch.arange(T) < lengths[:, None]
    mask &= torch.rand(B, T, generator=generator) < 0.7
    mask[:, 0] = True
    groups = torch.tensor([70, 5, 70, 5, 12, 70, 12, 70, 5])[torch.randperm(B, generator=generator)]
    noise = torch.randn(3, B, T, generator=generator, dtype=torch.float64)
    ends = torch.rand(B, T, generator=generator) < 0.5
    inputs = AdvantageInputs(
        scores=torch.randn(B, generator=generator, dtype=torch.float64),
        token_penalty=-0.1 * noise[0] if penalty else torch.zeros(B, T, dtype=torch.float64),
        mask=mask,
        groups=groups,
        values=noise[1].masked_fill(~mask, float("nan")),
        truncated=torch.rand(B, generator=generator) < 0.5,
        gamma=0.9,
        lam=0.8,
        step_rewards=noise[2].masked_fill(~(ends & mask), float("nan")),
        step_ends=ends,
    )
    known = {name: value for name, value in changes.items() if name in ("scores", "mask", "groups", "token_penalty")}
    inputs = dataclasses.replace(inputs, **known)
    return dataclasses.replace(enriched(inputs, seed + 1000), **changes)


def rows_of(inputs: AdvantageInputs, rows: list[int] | Tensor) -> AdvantageInputs:
    """The responses `rows` alone, in that order."""
    fields = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    fields["rewards_by_source"] = {source: given[rows] for source, given in inputs.rewards_by_source.items()}
    return AdvantageInputs(**{name: v[rows] if isinstance(v, Tensor) else v for name, v in fields.items()})


def places(inputs: AdvantageInputs, row: int) -> list[int]:
    """Columns of the sampled tokens of a row."""
    return [t for t in range(inputs.mask.shape[1]) if inputs.mask[row, t]]


def dense(inputs: AdvantageInputs, rows: dict[int, list[float]]) -> Tensor:
    """`rows[i][k]` at the k-th sampled token of row i, 0 elsewhere."""
    out = torch.zeros(inputs.mask.shape, dtype=torch.float64)
    for row, values in rows.items():
        for t, value in zip(places(inputs, row), values, strict=True):
            out[row, t] = value
    return out


def constant(inputs: AdvantageInputs, per_response: list[float]) -> Tensor:
    """One number per response at each of its sampled tokens."""
    return dense(inputs, {i: [a] * len(places(inputs, i)) for i, a in enumerate(per_response)})


def rewards_of(inputs: AdvantageInputs, row: int) -> list[float]:
    """Rewards at the sampled tokens only: the penalty of each, the score added to the last."""
    rewards = [float(inputs.token_penalty[row, t]) for t in places(inputs, row)]
    if rewards:
        rewards[-1] += float(inputs.scores[row])
    return rewards


def same(got: Tensor, want: Tensor) -> None:
    """Equal element by element, to float64's rounding."""
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def given_to(loss: str, tokens: int) -> dict[str, Tensor]:
    """What a built-in policy loss takes by name beside what all take: every third of N tokens chosen."""
    return {"chosen": (torch.arange(tokens) % 3 == 1).double()} if POLICY_LOSSES[loss].choice else {}
