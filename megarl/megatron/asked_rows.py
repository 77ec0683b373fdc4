"""The rows of hidden states that a head is asked about: what sequences have in common is asked once. Pure tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.data.stream import SCORED_IDS, PackedStream, StreamShard

WORTH_IT = 0.9
"""Share of the rows that may be left for it to be worth asking about others by their places."""


class AskedRows(NamedTuple):
    """A rank's rows of a stream, and the targets of each.

    `rows` int64 `[U]`, `targets` int64 `[U]` or `[U, M]`. `places` int64 `[n]`: which of these each of the rank's n scored
    tokens is; None: they are the scored tokens, in their order.
    """

    rows: Tensor
    targets: Tensor
    places: Tensor | None

    @classmethod
    def of(cls, stream: PackedStream, share: StreamShard) -> AskedRows:
        """Find the rows of a rank's share of a stream, in main memory."""
        rows, targets = share.rows, _targets(stream)[share.scored]
        positions = int(torch.count_nonzero(torch.bincount(rows))) if len(rows) else 0
        if positions >= WORTH_IT * len(rows):
            return cls(rows, targets, None)
        if targets.dim() == 1:
            width = int(targets.max()) + 1
            distinct, places = torch.unique(rows * width + targets, return_inverse=True)
            found = cls(distinct // width, distinct % width, places)
        else:
            distinct, places = torch.unique(torch.cat([rows[:, None], targets], dim=1), dim=0, return_inverse=True)
            found = cls(distinct[:, 0].contiguous(), distinct[:, 1:].contiguous(), places)
        return found if len(distinct) < WORTH_IT * len(rows) else cls(rows, targets, None)

    def to(self, device: torch.device) -> AskedRows:
        """The same on `device`."""
        return AskedRows(self.rows.to(device), self.targets.to(device), None if self.places is None else self.places.to(device))

    def of_tokens(self, answered: Tensor) -> Tensor:
        """Lay what a head answered, `[U, C]`, out by scored token, `[n, C]`; gradients are summed in a fixed order."""
        return answered if self.places is None else answered[self.places]


def _targets(stream: PackedStream) -> Tensor:
    """The tokens whose log-probs are asked for, int64 `[N]`, or `[N, 1 + k]` with the k of the column `SCORED_IDS`."""
    further = stream.columns.get(SCORED_IDS)
    return stream.targets if further is None else torch.cat([stream.targets[:, None], further.long()], dim=1)
