"""Shares whose tokens lie in a store: what a driver sends of one, and how a rank that is handed the values makes it whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megarl.algorithms.shard import Shard
from megarl.data.answers import Answers
from megarl.data.batch import Batch
from megarl.data.shares import Integers, Share, starts_of
from megarl.data.stored import ResponseTokens, Stored

MASK = "mask"
"""The stored column of the tokens that are in the mask, 1 or 0, where not all of a response are."""
ROLLOUT = "rollout_log_probs"
"""The column that lies beside the tokens."""


@dataclass(frozen=True, eq=False)
class StoredColumn:
    """A column of a batch's rows in a store: row r's values are the `index`-th column of its row in the `Answers` that
    `objects[of_row[r]]` stands for; −1: it has none, and is 0. `of_row` int64 `[B]`."""

    objects: tuple[Stored, ...]
    of_row: Integers
    index: int


class RowWork(Protocol):
    """A function of a batch's rows, which processes that have their tokens get as a value."""

    def __call__(self, batch: Batch, shard: Shard, /, *arguments: Any) -> Any:
        """Set columns of `batch`, which has rows of whole groups, and its mask; `shard` is the way to the other rows."""
        ...


@dataclass(frozen=True)
class RowTask:
    """Work that is done where a batch's tokens are, in parts of whole groups.

    `work` is called as `work(batch, shard, *common, *arguments(rows))` for the part that has these rows of the batch; every
    part calls its shard equally often. `columns` are those that it reads, of those that there are (None: all). Unless it may
    be done `apart`, one part has all rows.
    """

    work: RowWork
    common: Sequence[Any] = ()
    arguments: Callable[[Sequence[int]], Sequence[Any]] = lambda rows: ()
    columns: Collection[str] | None = None
    apart: bool = True


@dataclass(frozen=True)
class Computed:
    """Outcome of a `RowWork` on some rows: its answer, the names of the columns that it set, and how many tokens of each
    row are in the mask, int64 `[b]` (None: as many as before). A driver reads it, so it has no tensors: from a process that
    imported megatron-core (0.19), pickle reads these by a function of its, and imports it."""

    answer: Any
    names: list[str]
    counts: Integers | None


@dataclass(frozen=True, eq=False)
class StoredShare(Share):
    """A share with the places of its R responses' values in place of these: `prompt_ids`, `token_ids` and `mask` are empty,
    `columns` has only what the driver has.

    `objects` are what the numbers below count. `tokens_in` int64 `[R]`: the `ResponseTokens` that have each response, and
    `tokens_at` int64 `[R]` its place there. `stored`: by column the number of each response's `Answers` (−1: 0s), int64 `[R]`,
    and the index of the column in them; without numbers it lies beside the tokens. `of_rows`: columns that have one number per
    response, float32 `[R]`, for its tokens in the mask. `masked`: the tokens in the mask are the stored column `MASK`; else
    all. `scored`: how many are.
    """

    objects: tuple[Stored, ...] = ()
    tokens_in: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    tokens_at: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    stored: Mapping[str, tuple[Integers, int]] = field(default_factory=dict)
    of_rows: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    masked: bool = False
    scored: int = 0

    @property
    def scored_tokens(self) -> int:
        """Tokens that are scored."""
        return self.scored

    def whole(self, values: Sequence[Any]) -> Share:
        """The share with its tokens, mask and columns; `values` are those that `objects` stand for.

        Raises:
            ValueError: a column of a response has another number of values than the response has tokens.
        """
        lengths, rows = self.lengths.tolist(), self.rows.tolist()
        tokens: list[ResponseTokens] = [values[number] for number in self.tokens_in.tolist()]
        places = [of.place(place) for of, place in zip(tokens, self.tokens_at.tolist(), strict=True)]
        starts = starts_of(self.lengths)

        def laid(of_responses: Iterable[npt.NDArray[Any] | None], kind: type[np.generic]) -> npt.NDArray[Any]:
            flat = np.zeros(int(starts[-1]), kind)
            for start, length, of_response, row in zip(starts.tolist(), lengths, of_responses, rows, strict=False):
                if of_response is not None:
                    if len(of_response) != length:
                        raise ValueError(f"row {row} has {length} tokens, but {len(of_response)} values")
                    flat[start : start + length] = of_response
            return flat

        def answered(name: str) -> Iterable[npt.NDArray[Any] | None]:
            numbers, index = self.stored[name]
            for number, row in zip(numbers.tolist(), rows, strict=True):
                answers: Answers | None = values[number] if number >= 0 else None
                yield None if answers is None else answers.columns[index, answers.places[row]]

        ids = laid((of.token_ids[place] for of, place in zip(tokens, places, strict=True)), np.int32)
        if len(self.mask):
            mask = self.mask
        else:
            mask = laid(answered(MASK), np.float32) > 0 if self.masked else np.ones(len(ids), np.bool_)
        columns = dict(self.columns)
        for name in self.stored:
            if name == ROLLOUT and not len(self.stored[name][0]):
                columns[name] = laid((of.log_probs[place] for of, place in zip(tokens, places, strict=True)), np.float32)
            elif name != MASK:
                columns[name] = laid(answered(name), np.float32)
        for name, numbers in self.of_rows.items():
            columns[name] = np.where(mask, np.repeat(numbers, self.lengths), np.float32(0))
        first = starts_of(self.units)[:-1].tolist() if self.prompt_lengths.any() else []
        prompts = [tokens[row].prompt(int(self.tokens_at[row])) for row in first]
        whole = {"prompt_ids": np.concatenate([np.zeros(0, np.int32), *prompts]), "token_ids": ids, "mask": mask}
        kept = {entry.name: getattr(self, entry.name) for entry in fields(Share)}
        return Share(**kept | whole | {"columns": columns})
