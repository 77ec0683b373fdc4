"""A small batch of responses with everything estimators read, and plain-Python views of it that tests compute with."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import AdvantageInputs
from megarl.algorithms.catalogue import POLICY_LOSSES

B, T = 9, 8


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
    return dataclasses.replace(inputs, **changes)


def rows_of(inputs: AdvantageInputs, rows: list[int] | Tensor) -> AdvantageInputs:
    """The responses `rows` alone, in that order."""
    fields = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
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
