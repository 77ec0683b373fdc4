"""Statistics over the responses of a prompt, or over their steps or turns: what estimators that compare them share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages import AdvantageInputs, group_total
from megarl.algorithms.shard import row_sums


@dataclass(frozen=True)
class GroupStatistics:
    """Values of N responses or steps, and for each of them its group's statistics, `[N]`; only members count in any."""

    index: Tensor
    """int64: groups numbered from 0."""
    count: int
    """Number of groups."""
    centred: Tensor
    """float64: value − mean; exactly 0 in tied groups and for those that are no members."""
    size: Tensor
    """int64: members."""
    tied: Tensor
    """bool: all values are equal."""
    alone: Tensor
    """bool: a member without another."""

    @classmethod
    def of(cls, values: Tensor, index: Tensor, count: int, member: Tensor | None = None) -> GroupStatistics:
        """Statistics of `values` float64 `[N]` by `index` int64 `[N]`; `member` bool `[N]`, None: all are."""
        member = torch.ones_like(index, dtype=torch.bool) if member is None else member

        def extreme(reduction: str, ignored: float) -> Tensor:
            among = torch.where(member, values, ignored)
            return among.new_zeros(count).scatter_reduce(0, index, among, reduction, include_self=False)[index]

        tied = extreme("amin", torch.inf) == extreme("amax", -torch.inf)
        size = group_total(member.long(), index, count)
        mean = group_total(torch.where(member, values, 0), index, count) / size.clamp(min=1)
        return cls(index, count, torch.where(member & ~tied, values - mean, 0), size, tied, member & (size == 1))

    def total(self, x: Tensor) -> Tensor:
        """Sum of `x` `[N]` over each one's group, `[N]`."""
        return group_total(x, self.index, self.count)

    def standardised(self, inputs: AdvantageInputs) -> Tensor:
        """(value − mean) / (std + eps), float64 `[N]`, with `eps` and `unbiased` of `inputs`; exactly 0 in tied groups."""
        freedom = (self.size - int(inputs.unbiased)).clamp(min=1)
        deviation = (self.total(self.centred * self.centred) / freedom).sqrt() + inputs.eps
        return torch.where(self.tied, 0, self.centred / deviation)


def response_statistics(inputs: AdvantageInputs, values: Tensor | None = None) -> GroupStatistics:
    """Statistics of `values` float64 `[B]` by `inputs.groups` (None: of R); responses without sampled tokens are no members."""
    if values is None:
        values = inputs.scores.double() + row_sums(inputs.token_penalty, inputs.mask)
    _, index = inputs.groups.unique(return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    return GroupStatistics.of(values, index, count, inputs.mask.any(1))


def rows_of_groups(inputs: AdvantageInputs, kept: Tensor) -> Iterator[Tensor]:
    """The rows of each group that have sampled tokens, int64 `[n]`; only those in `kept` bool `[B]`, and no empty ones."""
    rows = (inputs.mask.any(1) & kept).nonzero().squeeze(1)
    groups = inputs.groups[rows]
    yield from (rows[groups == group] for group in groups.unique())
