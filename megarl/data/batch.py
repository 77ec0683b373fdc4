"""A step's samples as columns, and how they travel to the data-parallel ranks and back.

Rows are samples, columns are right-padded `[B, T]` tensors over response tokens. Results return under their row index,
so no rank's order matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megarl.data.sample import Sample
from megarl.data.stream import Response, Unit


class Batch:
    """B samples with up to T response tokens.

    `mask` bool `[B, T]`: tokens the policy sampled. `groups` int64 `[B]`: equal where group ids are equal.
    `columns`: float32 `[B, T]` by name. From the start there are `rollout_log_probs`, unless a response was made by no
    engine, and `labels` (0 outside the mask), if every sample with tokens in the mask has them.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)
        length = max((len(s.response_ids) for s in self.samples), default=0)
        self.mask = torch.zeros(len(self.samples), length, dtype=torch.bool)
        for row, sample in enumerate(self.samples):
            size = len(sample.response_ids)
            self.mask[row, :size] = torch.tensor(sample.sampled_mask, dtype=torch.bool)
        numbers: dict[str, int] = {}
        self.groups = torch.tensor([numbers.setdefault(s.group_id, len(numbers)) for s in self.samples])
        self.columns: dict[str, Tensor] = {}
        if all(sample.has_rollout for sample in self.samples):
            rollout = self.columns["rollout_log_probs"] = torch.zeros(self.mask.shape)
            for row, sample in enumerate(self.samples):
                rollout[row, : len(sample.response_ids)] = torch.tensor(sample.rollout_log_probs)
        given = [label for sample in self.samples for label in sample.labels]
        if given and len(given) == self.response_tokens:
            labels = self.columns["labels"] = torch.zeros(self.mask.shape)
            labels[self.mask] = torch.tensor(given)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def response_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.mask.sum())

    @property
    def truncated(self) -> Tensor:
        """bool `[B]`: responses that were cut by the length limit."""
        return torch.tensor([sample.truncated for sample in self.samples], dtype=torch.bool)

    @property
    def last_tokens(self) -> Tensor:
        """bool `[B, T]`, True at the last token of every response."""
        lengths = torch.tensor([len(sample.response_ids) for sample in self.samples])
        return torch.arange(self.mask.shape[1]) == lengths[:, None] - 1

    def gather(self, names: Sequence[str], answers: Iterable[dict[int, Tensor]]) -> None:
        """Add columns `names` from the ranks' answers `{row: [L, C]}`; every row must be answered exactly once.

        Raises:
            ValueError: a row was answered twice or not at all.
        """
        columns = [torch.zeros(self.mask.shape) for _ in names]
        seen: set[int] = set()
        for answer in answers:
            for row, values in answer.items():
                if row in seen:
                    raise ValueError(f"row {row} was answered by two ranks")
                seen.add(row)
                for place, column in enumerate(columns):
                    column[row, : len(values)] = values[:, place]
        if len(seen) != len(self):
            raise ValueError(f"{len(self) - len(seen)} of {len(self)} rows were not answered by any rank")
        self.columns.update(zip(names, columns, strict=True))

    def units(
        self, rows: Sequence[int], columns: Sequence[str], *, share_prefix: bool, mask: Tensor | None = None
    ) -> list[Unit]:
        """`rows` as prompt units that carry `columns`; rows of one group share a unit if `share_prefix`.

        `mask` bool `[B, T]` says which tokens are scored; None: those that the policy sampled.
        """
        mask = self.mask if mask is None else mask
        units: dict[tuple[int, ...], Unit] = {}
        for row in rows:
            sample = self.samples[row]
            size = len(sample.response_ids)
            response = Response(
                row,
                torch.tensor(sample.response_ids, dtype=torch.long),
                # Copies: a view would take the whole batch's column along to each rank.
                mask[row, :size].clone(),
                {name: self.columns[name][row, :size].clone() for name in columns},
            )
            key = (int(self.groups[row]), *sample.prompt_ids) if share_prefix else (row,)
            unit = units.setdefault(key, Unit(torch.tensor(sample.prompt_ids, dtype=torch.long), []))
            unit.responses.append(response)
        return list(units.values())
