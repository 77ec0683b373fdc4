"""Values that ranks computed per token, as flat buffers that travel in one piece; each response's values stand under its
index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Answers(Mapping[int, Tensor]):
    """`{response index: float32 [L, C]}` in three arrays, whatever the number of responses.

    `rows` int64 `[R]` are the indices, `lengths` int64 `[R]` the tokens of each, and `columns` float32 `[C, total]` the values
    of all of them in this order.
    """

    def __init__(self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], columns: npt.NDArray[np.float32]) -> None:
        self.rows, self.lengths, self.columns = rows, lengths, columns

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """One for all of `parts`, which have as many columns; without parts an empty one."""
        if not parts:
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0), np.float32))
        return cls(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.columns for part in parts], axis=1),
        )

    def of_rows(self, rows: Sequence[int]) -> Answers:
        """The answers under `rows` alone."""
        is_kept = np.isin(self.rows, rows)
        return Answers(self.rows[is_kept], self.lengths[is_kept], self.columns[:, np.repeat(is_kept, self.lengths)])

    def __getitem__(self, row: int) -> Tensor:
        return torch.tensor(self.columns[:, self.places[row]]).T

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def places(self) -> dict[int, slice]:
        """The place of each row's tokens in every column."""
        ends = np.cumsum(self.lengths)
        return dict(zip(self.rows.tolist(), map(slice, (ends - self.lengths).tolist(), ends.tolist()), strict=True))
