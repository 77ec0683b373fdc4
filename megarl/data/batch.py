"""A step's samples as columns, and how they travel to the data-parallel ranks and back.

Rows are samples, columns are right-padded `[B, T]` tensors over response tokens. Tokens, and what is sent of the columns, lie
without padding, one sequence after another. Results return under their row index, so no rank's order matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.data.answers import Answers
from megarl.data.columns import TokenColumn, TokenValues, of_tokens
from megarl.data.micro_batches import Assignment, UnitPart, UnitSize
from megarl.data.prefix_tree import NOTHING_SHARED, CommonPrefixes, common_prefixes
from megarl.data.sample import Sample
from megarl.data.shares import Integers, Share, starts_of

ShareKind = TypeVar("ShareKind", bound=Share)
Key = TypeVar("Key")


@dataclass(frozen=True)
class UnitRows:
    """Rows of a batch that are computed with one prompt: `rows` int64 `[R]`, unit after unit, of which unit u has those from
    `starts[u]` to `starts[u + 1]` (int64 `[U + 1]`). `sizes` are what `plan_micro_batches` takes.
    """

    rows: Integers
    starts: Integers
    sizes: tuple[UnitSize, ...]

    def with_copied_prompts(self, plan: Assignment) -> tuple[UnitRows, Assignment]:
        """The same rows as a unit each, and `plan` in these units: a piece's responses stay beside each other."""
        sizes = tuple(
            UnitSize(size.prompt_tokens, (tokens,), size.grids_of([index]))
            for size in self.sizes
            for index, tokens in enumerate(size.response_tokens)
        )
        starts = self.starts.tolist()

        def of_responses(pieces: Sequence[UnitPart]) -> list[UnitPart]:
            return [(starts[unit] + index, (0,)) for unit, places in pieces for index in places]

        return UnitRows(self.rows, np.arange(len(self.rows) + 1), sizes), [list(map(of_responses, share)) for share in plan]


class Batch:
    """B samples with up to T response tokens.

    `lengths` int64 `[B]`: tokens of each response. `mask` bool `[B, T]`: tokens the policy sampled. `groups` int64 `[B]`: equal
    where group ids are equal. `columns`: float32 `[B, T]` by name, or `[B, T, k]` of numbers of k tokens each. From the
    start there are `rollout_log_probs`, unless a response was made by no engine, and `labels` (0 outside the mask), if every
    sample with tokens in the mask has them. `extra`: the token columns of options by
    name, as engines gave them or `take_extra` was told.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)
        self._response_ids = [tokens_of(sample.response_ids) for sample in self.samples]
        self.lengths = torch.tensor([len(ids) for ids in self._response_ids], dtype=torch.long)
        sampled = (np.frombuffer(bytes(sample.sampled_mask), np.uint8) for sample in self.samples)
        self.mask = self._padded(sampled, torch.bool)
        of_group, _ = numbered(sample.group_id for sample in self.samples)
        self.groups = torch.from_numpy(of_group)
        keys = ((group, s.prompt_media, (*s.prompt_ids,)) for group, s in zip(of_group, self.samples, strict=True))
        self._prompt_of_row, prompts = numbered(keys)
        self._prompt_ids = [tokens_of(ids) for _, _, ids in prompts]  # each prompt of a group once
        self._media = [media for _, media, _ in prompts]
        self._told_media = [sample.response_media for sample in self.samples]
        self.extra: dict[str, TokenColumn] = {}
        for name in sorted({name for sample in self.samples for name in of_tokens(sample.extra)}):
            self.take_extra(name, [sample.extra.get(name) for sample in self.samples])
        self.has_parts = False
        """Whether options added their columns."""
        self.columns: MutableMapping[str, Tensor] = {}
        if all(sample.has_rollout for sample in self.samples):
            log_probs = (np.fromiter(s.rollout_log_probs, np.float32, len(s.rollout_log_probs)) for s in self.samples)
            self.columns["rollout_log_probs"] = self._padded(log_probs, torch.float32)
        known = [label for sample in self.samples for label in sample.labels]
        if known and len(known) == self.response_tokens:
            labels = self.columns["labels"] = torch.zeros(self.mask.shape)
            labels[self.mask] = torch.tensor(known)

    @classmethod
    def of_share(cls, samples: Sequence[Any], share: Share) -> Batch:
        """Lay the rows of a share, whose `samples` are `RowSample`s; its ids and token columns are left out."""
        batch = cls.__new__(cls)
        batch.samples, batch.has_parts, batch.extra = list(samples), True, {}
        batch.lengths = torch.tensor(share.lengths)
        batch.groups = torch.from_numpy(numbered(sample.group_id for sample in samples)[0])
        places = [slice(*ends) for ends in pairwise(starts_of(share.lengths).tolist())]
        batch.mask = batch._padded([share.mask[place] for place in places], torch.bool)
        batch.columns = {
            name: batch._padded([column[place] for place in places], torch.float32) for name, column in share.columns.items()
        }
        return batch

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def longest(self) -> int:
        """T."""
        return int(self.lengths.max()) if len(self) else 0

    @property
    def counts(self) -> Tensor:
        """int64 `[B]`: tokens of each response in the mask."""
        return self.mask.sum(1)

    def set_rows(self, name: str, numbers: Tensor) -> None:
        """Set a column to one number per row, float32 `[B]`, at its tokens in the mask."""
        self.columns[name] = torch.where(self.mask, numbers[:, None], 0)

    def set_zeros(self, name: str) -> None:
        """Set a column to zeros."""
        self.columns[name] = torch.zeros(self.mask.shape)

    def values(self, name: str, row: int) -> Tensor:
        """A column of one row, float32 `[L]`."""
        return self.columns[name][row, : int(self.lengths[row])]

    @property
    def prompts_show_pictures(self) -> bool:
        """Return whether any prompt does."""
        return any(self._media)

    @property
    def response_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.counts.sum())

    @property
    def truncated(self) -> Tensor:
        """bool `[B]`: responses that were cut by the length limit."""
        return torch.tensor([sample.truncated for sample in self.samples], dtype=torch.bool)

    @property
    def last_tokens(self) -> Tensor:
        """bool `[B, T]`, True at the last token of every response."""
        return torch.arange(self.longest) == self.lengths[:, None] - 1

    def take_extra(self, name: str, of_rows: Sequence[TokenValues | None]) -> None:
        """Take over the token column `name`, by row of a prompt and its response; None: not known."""
        if any(values is not None for values in of_rows):
            self.extra[name] = TokenColumn(name, of_rows, self._prompt_of_row.tolist(), [len(ids) for ids in self._prompt_ids])

    def gather(
        self,
        names: Sequence[str],
        answers: Iterable[Answers | None],
        wide: Mapping[str, int] = MappingProxyType({}),
        *,
        asked: Sequence[int] | None = None,
    ) -> None:
        """Add columns `names` `[B, T]` and, after them, `wide` `[B, T, k]` by name and k from the ranks' answers
        `{row: [L, C]}`; every row must be answered exactly once, or each of those `asked`: the others' values are 0 then.

        Raises:
            ValueError: a row was answered twice or not at all, or with another number of tokens or columns.
        """
        received = [answer for answer in answers if answer is not None]
        rows = np.concatenate([np.zeros(0, np.int64), *(answer.rows for answer in received)])
        times = np.bincount(rows, minlength=len(self))
        if (times > 1).any():
            raise ValueError(f"row {times.argmax()} was answered by two ranks")
        expected = times if asked is None else times[[*asked]]
        if not expected.all():
            raise ValueError(f"{(expected == 0).sum()} of {len(expected)} rows were not answered by any rank")
        columns, lengths = [np.zeros(self.mask.shape, np.float32) for _ in names], self.lengths.tolist()
        blocks = {name: np.zeros((*self.mask.shape, width), np.float32) for name, width in wide.items()}
        ends = list(accumulate([len(columns), *wide.values()]))
        for answer in received:
            for row, span in answer.places.items():
                if span.stop - span.start != lengths[row]:
                    raise ValueError(f"row {row} has {lengths[row]} tokens, but was answered with {span.stop - span.start}")
                if len(answer.columns) != ends[-1]:
                    raise ValueError(f"row {row} was answered with {len(answer.columns)} columns; there must be {ends[-1]}")
                for column, values in zip(columns, answer.columns, strict=False):
                    column[row, : lengths[row]] = values[span]
                for block, (start, end) in zip(blocks.values(), pairwise(ends), strict=True):
                    block[row, : lengths[row]] = answer.columns[start:end, span].T
        self.columns.update(zip(names, map(torch.from_numpy, columns), strict=True))
        self.columns.update({name: torch.from_numpy(block) for name, block in blocks.items()})

    def unit_rows(self, rows: Sequence[int], *, share_prefix: bool, share_turns: bool = True) -> UnitRows:
        """`rows` as prompt units, in the order in which they come; rows of one group and prompt are one if `share_prefix`.

        Without `share_turns` they share their prompt alone, even if they begin alike.
        """
        ordered = np.array(rows, dtype=np.int64)
        counts = np.ones(len(ordered), np.int64)
        if share_prefix:
            _, first, unit, counts = np.unique(
                self._prompt_of_row[ordered], return_index=True, return_inverse=True, return_counts=True
            )
            by_first = np.argsort(first)
            ordered, counts = ordered[np.argsort(first[unit], kind="stable")], counts[by_first]
        lengths, starts = self.lengths.numpy()[ordered].tolist(), starts_of(counts)
        prompts, ends = self._prompt_of_row[ordered[starts[:-1]]].tolist(), pairwise(starts.tolist())
        told_media = any(self._told_media)
        sizes = (
            UnitSize(
                len(self._prompt_ids[prompt]),
                tuple(lengths[a:b]),
                tuple(shown.grid for shown in self._media[prompt]),
                tuple(tuple(shown.grid for shown in self._told_media[row]) for row in ordered[a:b].tolist())
                if told_media
                else (),
                self._common(ordered[a:b].tolist()) if share_turns and b - a > 1 else NOTHING_SHARED,
            )
            for prompt, (a, b) in zip(prompts, ends, strict=True)
        )
        return UnitRows(ordered, starts, tuple(sizes))

    def _common(self, rows: Sequence[int]) -> CommonPrefixes:
        """The common beginnings of responses: tokens before their first pictures, and never the last one."""
        ends = (min([max(int(self.lengths[row]) - 1, 0), *(m.place for m in self._told_media[row])]) for row in rows)
        prefixes = common_prefixes([self._response_ids[row][:end] for row, end in zip(rows, ends, strict=True)])
        return prefixes if any(prefixes.common) else NOTHING_SHARED

    def shares(
        self, units: UnitRows, plan: Assignment, columns: Sequence[str], *, mask: Tensor | None = None, extra: bool = False
    ) -> list[Share]:
        """The share that each data-parallel replica computes of `units` by `plan`, with the tokens, the mask and
        `columns` of its rows.

        `mask` bool `[B, T]` says which tokens are scored; None: those that the policy sampled. `extra`: with the token columns
        of options.
        """
        laid = self._laid_prompts(units, [micro_batch for share in plan for micro_batch in share])
        numbers, lengths = laid.rows.tolist(), laid.lengths.tolist()
        whole = replace(
            laid,
            token_ids=np.concatenate([self._response_ids[row] for row in numbers]),
            mask=laid_rows(self.mask if mask is None else mask, numbers, lengths),
            columns={name: laid_rows(self.columns[name], numbers, lengths) for name in columns},
        )
        return (self._with_extra(whole) if extra else whole).cut([len(share) for share in plan])

    def _with_extra(self, share: ShareKind) -> ShareKind:
        """The share with the token columns of options."""
        if not self.extra:
            return share
        rows, lengths, prompt_lengths = share.rows.tolist(), share.lengths.tolist(), share.prompt_lengths.tolist()
        prompts = self._prompt_of_row[rows][starts_of(share.units)[:-1]].tolist()
        of_prompts = {name: ragged.prompts.laid(prompts, prompt_lengths) for name, ragged in self.extra.items()}
        of_responses = {name: ragged.responses.laid(rows, lengths) for name, ragged in self.extra.items()}
        return replace(share, prompt_extra=of_prompts, extra=of_responses)

    def _laid_prompts(self, units: UnitRows, micro_batches: Sequence[Sequence[UnitPart]]) -> Share:
        """A share of these micro-batches with the prompts' tokens, and without those of responses."""
        pieces = [piece for micro_batch in micro_batches for piece in micro_batch]
        unit = _array(number for number, _ in pieces)
        responses = _array(len(places) for _, places in pieces)
        rows = units.rows[np.repeat(units.starts[unit], responses) + _array(chain(*(places for _, places in pieces)))]
        prompt_numbers = self._prompt_of_row[units.rows[units.starts[unit]]].tolist()
        prompts = self._ids_of(prompt_numbers)
        media = tuple(self._media[prompt] for prompt in prompt_numbers)
        told_media = tuple(self._told_media[row] for row in rows.tolist())
        repeats = tuple(units.sizes[number].common.repeats(places) for number, places in pieces)
        return Share(
            _array(map(len, micro_batches)),
            responses,
            _array(len(self._prompt_ids[prompt]) for prompt in prompt_numbers),
            rows,
            self.lengths.numpy()[rows],
            np.concatenate([np.zeros(0, np.int32), *prompts]),
            np.zeros(0, np.int32),
            np.zeros(0, np.bool_),
            {},
            media if any(media) else (),
            told_media if any(told_media) else (),
            repeats=repeats if any(repeats) else (),
        )

    def _ids_of(self, prompts: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        return [self._prompt_ids[prompt] for prompt in prompts]

    def _padded(self, rows: Iterable[npt.NDArray[Any]], dtype: torch.dtype) -> Tensor:
        """The values of every row's tokens as `[B, T]`."""
        padded = torch.zeros(len(self), self.longest, dtype=dtype)
        for values, row in zip(padded.numpy(), rows, strict=True):
            values[: len(row)] = row
        return padded


def numbered(keys: Iterable[Key]) -> tuple[Integers, list[Key]]:
    """The number of each key, int64 `[n]`, and the different keys in order of their numbers, which is that of their coming."""
    numbers: dict[Key, int] = {}
    return _array([numbers.setdefault(key, len(numbers)) for key in keys]), [*numbers]


def tokens_of(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """int32 has room for every vocabulary, and is half of what travels. Of an array no token is looked at by itself."""
    return ids.astype(np.int32, copy=False) if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int32, len(ids))


def laid_rows(column: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[Any]:
    """The values of these `rows` of a column `[B, T, ...]`, one row behind the other without padding."""
    values = column.numpy()
    return np.concatenate([values[row, :length] for row, length in zip(rows, lengths, strict=True)])


def _array(numbers: Iterable[int]) -> Integers:
    return np.fromiter(numbers, np.int64)
