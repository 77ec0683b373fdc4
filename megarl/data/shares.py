"""The share of a data-parallel replica in a pass, as flat buffers that travel in one piece, however many responses it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.data.columns import TokenValues
from megarl.data.media import Media
from megarl.data.stream import MicroBatch, Response, Unit

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Share:
    """M micro-batches with U units in all, whose R responses have L tokens in all; prompts have P tokens in all.

    `micro_batches` int64 `[M]`: units of each. `units` int64 `[U]`: responses of each. `prompt_lengths` int64 `[U]` and
    `lengths` int64 `[R]`: tokens of each prompt and response. `rows` int64 `[R]`: each response's row in the batch.
    `prompt_ids` int32 `[P]` and `token_ids` int32 `[L]`: the tokens, one prompt or response after another. `mask` bool `[L]`
    and `columns` float `[L]` or `[L, k]`: as in `Response`. `media`: the pictures of each of the U prompts,
    `told_media`: of each of the R responses; empty where none has any. `prompt_extra` `[P, ...]` and `extra` `[L, ...]` are
    the token columns of options by name. `repeats`: by unit how many first tokens some
    of its responses have from another one; empty where no unit has any.
    """

    micro_batches: Integers
    units: Integers
    prompt_lengths: Integers
    rows: Integers
    lengths: Integers
    prompt_ids: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    columns: dict[str, npt.NDArray[Any]]
    media: tuple[tuple[Media, ...], ...] = ()
    told_media: tuple[tuple[Media, ...], ...] = ()
    prompt_extra: dict[str, TokenValues] = field(default_factory=dict)
    extra: dict[str, TokenValues] = field(default_factory=dict)
    repeats: tuple[tuple[int, ...], ...] = ()

    @property
    def scored_tokens(self) -> int:
        """Tokens that are scored."""
        return int(self.mask.sum())

    def __iter__(self) -> Iterator[MicroBatch]:
        """The micro-batches; their tensors are views of one copy, as what came through Ray's store cannot be written to."""
        lengths = self.lengths.tolist()
        tokens, masks = torch.tensor(self.token_ids).long().split(lengths), torch.tensor(self.mask).split(lengths)
        columns = {name: torch.tensor(column).split(lengths) for name, column in self.columns.items()}
        response_media, extra = self.told_media or ((),) * len(self.rows), _pieces(self.extra, lengths)
        responses = (
            Response(
                row,
                tokens[index],
                masks[index],
                {name: column[index] for name, column in columns.items()},
                response_media[index],
                extra=extra[index],
            )
            for index, row in enumerate(self.rows.tolist())
        )
        prompt_lengths = self.prompt_lengths.tolist()
        prompts = torch.tensor(self.prompt_ids).long().split(prompt_lengths)
        shown = self.media or ((),) * len(prompts)
        beside = _pieces(self.prompt_extra, prompt_lengths)
        units = (
            Unit(prompt, [*islice(responses, n)], m, extra=unit_extra)
            for prompt, n, m, unit_extra in zip(prompts, self.units.tolist(), shown, beside, strict=True)
        )
        return (list(islice(units, count)) for count in self.micro_batches.tolist())

    def cut(self, counts: Sequence[int]) -> list[Share]:
        """Shares of `counts` micro-batches each, in order; their arrays are views of this one's."""
        micro_batches = starts_of(np.array(counts, dtype=np.int64))
        units = starts_of(self.micro_batches)[micro_batches]
        rows = starts_of(self.units)[units]
        prompts, tokens = starts_of(self.prompt_lengths)[units], starts_of(self.lengths)[rows]
        parts = zip(*map(_slices, (micro_batches, units, rows, prompts, tokens)), strict=True)
        return [
            Share(
                self.micro_batches[m],
                self.units[u],
                self.prompt_lengths[u],
                self.rows[r],
                self.lengths[r],
                self.prompt_ids[p],
                self.token_ids[t],
                self.mask[t],
                {name: column[t] for name, column in self.columns.items()},
                self.media[u],
                self.told_media[r],
                {name: values[p] for name, values in self.prompt_extra.items()},
                {name: values[t] for name, values in self.extra.items()},
                self.repeats[u],
            )
            for m, u, r, p, t in parts
        ]


def starts_of(lengths: Integers) -> Integers:
    """int64 `[n + 1]`: where each of n pieces that lie one after another starts, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _pieces(extra: Mapping[str, TokenValues], lengths: Sequence[int]) -> Sequence[dict[str, Tensor]]:
    """Split token columns by sequence; sequence i has `lengths[i]` tokens."""
    split = {name: torch.tensor(values).split(list(lengths)) for name, values in extra.items()}
    return [{name: pieces[i] for name, pieces in split.items()} for i in range(len(lengths))]


def _slices(starts: Integers) -> list[slice]:
    return [slice(*ends) for ends in pairwise(starts.tolist())]
