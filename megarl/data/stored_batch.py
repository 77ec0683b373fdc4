"""A step's samples whose tokens lie in a store: the driver has what a decision needs of each, and says where the rest is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.data.answers import Answers
from megarl.data.batch import Batch, UnitRows, laid_rows, numbered, tokens_of
from megarl.data.micro_batches import Assignment
from megarl.data.prefix_tree import NOTHING_SHARED, CommonPrefixes
from megarl.data.sample import Sample
from megarl.data.shares import Integers, Share
from megarl.data.stored import ResponseTokens, Stored, StoredSample
from megarl.data.stored_shares import MASK, ROLLOUT, StoredColumn, StoredShare


class StoredColumns(MutableMapping[str, Tensor]):
    """The columns of a `StoredBatch` by name, float32 `[B, T]` to whoever reads one: which is then fetched into this process.

    What is set is kept here. `at` has those that lie in a store, and `of_rows` those with one number per row, float32 `[B]`,
    for its tokens in the mask.
    """

    def __init__(self, batch: StoredBatch) -> None:
        self._batch = batch
        self._here: dict[str, Tensor] = {}
        self.at: dict[str, StoredColumn] = {}
        self.of_rows: dict[str, Tensor] = {}

    def __copy__(self) -> StoredColumns:
        """The same columns under the same names, for later changes."""
        copied = StoredColumns(self._batch)
        copied._here, copied.at, copied.of_rows = dict(self._here), dict(self.at), dict(self.of_rows)
        return copied

    @property
    def here(self) -> Mapping[str, Tensor]:
        """Columns that were set in this process, `[B, T]` or `[B, T, k]`."""
        return self._here

    def lies_beside_tokens(self, name: str) -> bool:
        """Return whether a stored column is in the objects of the tokens."""
        return name == ROLLOUT and not self.at[name].objects

    def store(self, name: str, column: StoredColumn) -> None:
        """Take over a column that lies in a store."""
        self.pop(name, None)
        self.at[name] = column

    def set_rows(self, name: str, numbers: Tensor) -> None:
        """Take over a column of one number per row, `[B]`."""
        self.pop(name, None)
        self.of_rows[name] = numbers.float()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._here:
            return self._here[name]
        if name in self.of_rows:
            return torch.where(self._batch.mask, self.of_rows[name][:, None], 0)
        return self._batch.fetched(name, self.at[name])

    def __setitem__(self, name: str, column: Tensor) -> None:
        self.pop(name, None)
        self._here[name] = column

    def __delitem__(self, name: str) -> None:
        for kept in (self._here, self.at, self.of_rows):
            if name in kept:
                del kept[name]
                return
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name != MASK and any(name in kept for kept in (self._here, self.at, self.of_rows))

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in (*self.at, *self.of_rows, *self._here) if name != MASK)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class StoredBatch(Batch):
    """B samples whose tokens, log-probs and further columns lie in a store.

    Reading the mask or a column fetches it: whoever can work on shards does that (`TrainingSide.compute`).
    """

    samples: list[StoredSample]  # type: ignore[assignment]
    columns: StoredColumns

    def __init__(self, samples: Sequence[StoredSample]) -> None:  # the tokens that `Batch` lays are not here
        self.samples = list(samples)
        self.lengths = torch.tensor([sample.response_length for sample in self.samples], dtype=torch.long)
        self._counts = self.lengths.clone()
        of_group, _ = numbered(sample.group_id for sample in self.samples)
        self.groups = torch.from_numpy(of_group)
        keys = [(group, id(sample.prompt)) for group, sample in zip(of_group, self.samples, strict=True)]
        self._prompt_of_row, _ = numbered(keys)
        prompts = list({key: sample.prompt for key, sample in zip(keys, self.samples, strict=True)}.values())
        self._prompt_ids = [tokens_of(prompt.prompt_ids) for prompt in prompts]
        self._media = [(*prompt.media,) for prompt in prompts]
        self._told_media = [() for _ in self.samples]
        self.extra = {}
        self.has_parts = False
        self._mask: Tensor | None = None
        self._units: dict[tuple[Any, ...], UnitRows] = {}
        self._laid: list[tuple[UnitRows, Assignment, list[Share]]] = []
        self._tokens: list[Stored] = []
        of_objects: dict[int, int] = {}
        tokens_in = [_listed(sample.generation.stored, self._tokens, of_objects) for sample in self.samples]
        self._tokens_in = np.array(tokens_in, dtype=np.int64)
        self._tokens_at = np.array([sample.generation.place for sample in self.samples], dtype=np.int64)
        self.columns = StoredColumns(self)
        self.columns.store(ROLLOUT, StoredColumn((), np.zeros(0, np.int64), 0))

    @property
    def is_masked(self) -> bool:
        """Return whether some tokens of responses are not in the mask."""
        return self._mask is not None or MASK in self.columns.at

    @property
    def mask(self) -> Tensor:  # type: ignore[override]
        """bool `[B, T]`; fetched where not all tokens of a response are in it."""
        if self._mask is not None:
            return self._mask
        if MASK in self.columns.at:
            return self.fetched(MASK, self.columns.at[MASK]) > 0
        return torch.arange(self.longest) < self.lengths[:, None]

    @mask.setter
    def mask(self, mask: Tensor) -> None:
        self._mask, self._counts = mask, mask.sum(1)

    @property
    def counts(self) -> Tensor:
        """int64 `[B]`: tokens of each response in the mask."""
        return self._counts

    def set_rows(self, name: str, numbers: Tensor) -> None:
        """Set a column to one number per row, float32 `[B]`, at its tokens in the mask."""
        self.columns.set_rows(name, numbers)

    def set_zeros(self, name: str) -> None:
        """Set a column to zeros."""
        self.take([name], [])

    def values(self, name: str, row: int) -> Tensor:
        """A column of one row, float32 `[L]`; what lies in a store is fetched for this row alone."""
        if name not in self.columns.at:
            return super().values(name, row)
        if self.columns.lies_beside_tokens(name):
            tokens: ResponseTokens = self._tokens[self._tokens_in[row]].get()
            return torch.tensor(tokens.log_probs[tokens.place(int(self._tokens_at[row]))])
        column = self.columns.at[name]
        number = int(column.of_row[row])
        if number < 0:
            return torch.zeros(int(self.lengths[row]))
        answers: Answers = column.objects[number].get()
        return torch.tensor(answers.columns[column.index, answers.places[row]])

    def fetched(self, name: str, column: StoredColumn) -> Tensor:
        """A column as float32 `[B, T]` in this process."""
        values = torch.zeros(len(self), self.longest)
        rows = values.numpy()
        if self.columns.lies_beside_tokens(name):
            for row, (number, place) in enumerate(zip(self._tokens_in.tolist(), self._tokens_at.tolist(), strict=True)):
                tokens: ResponseTokens = self._tokens[number].get()
                rows[row, : self.lengths[row]] = tokens.log_probs[tokens.place(place)]
            return values
        for number, stored in enumerate(column.objects):
            answers: Answers = stored.get()
            for row in np.flatnonzero(column.of_row == number).tolist():
                rows[row, : self.lengths[row]] = answers.columns[column.index, answers.places[row]]
        return values

    def take(self, names: Sequence[str], answers: Sequence[tuple[Stored, Sequence[int]]]) -> None:
        """Take over the columns `names` of the stored `Answers`, each with the rows that it has; other rows are 0."""
        column = _with_further(StoredColumn((), np.full(len(self), -1, np.int64), 0), answers)
        for index, name in enumerate(names):
            self.columns.store(name, replace(column, index=index))

    def take_mask(self, answers: Sequence[tuple[Stored, Sequence[int]]], index: int, counts: Tensor) -> None:
        """Take over the mask, the `index`-th column of the stored `Answers`, and the numbers of tokens in it, int64 `[B]`."""
        empty = StoredColumn((), np.full(len(self), -1, np.int64), index)
        self.columns.at[MASK] = _with_further(empty, answers)
        self._mask, self._counts = None, counts

    def take_further(self, name: str, answers: Sequence[tuple[Stored, Sequence[int]]]) -> None:
        """Take over the first column of the stored `Answers` for further rows of a column that others have."""
        self.columns.at[name] = _with_further(self.columns.at[name], answers)

    def lone_rows(self, rows: Sequence[int], columns: Sequence[str]) -> StoredShare:
        """A share of these rows, in their order, with `columns` and without prompts."""
        ordered = np.array(rows, np.int64)
        ones, nothing = np.ones(len(rows), np.int64), np.zeros(len(rows), np.int64)
        no_ids, no_mask = np.zeros(0, np.int32), np.zeros(0, np.bool_)
        bare = Share(ones, ones, nothing, ordered, self.lengths.numpy()[ordered], no_ids, no_ids, no_mask, {})
        return self._share(bare, columns, None)

    def _ids_of(self, prompts: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        return []  # they lie beside the tokens of the responses

    def _common(self, rows: Sequence[int]) -> CommonPrefixes:
        generations = [self.samples[row].generation for row in rows]
        if len({id(generation.common) for generation in generations}) > 1:
            return NOTHING_SHARED  # of several answers, which were not compared
        return generations[0].common.among([generation.member for generation in generations])

    def unit_rows(self, rows: Sequence[int], *, share_prefix: bool, share_turns: bool = True) -> UnitRows:
        """Unit rows as `Batch.unit_rows` makes them, once for the passes of a step."""
        key = ((*rows,), share_prefix, share_turns)
        if key not in self._units:
            self._units[key] = super().unit_rows(rows, share_prefix=share_prefix, share_turns=share_turns)
        return self._units[key]

    def _laid_shares(self, units: UnitRows, plan: Assignment) -> list[Share]:
        """Replicas' shares without values, once for the passes that have one plan."""
        for known_units, known_plan, shares in self._laid:
            if known_units is units and known_plan is plan:
                return shares
        self._laid.append((units, plan, [self._laid_prompts(units, share) for share in plan]))
        return self._laid[-1][2]

    def shares(  # type: ignore[override]
        self, units: UnitRows, plan: Assignment, columns: Sequence[str], *, mask: Tensor | None = None, extra: bool = False
    ) -> list[StoredShare]:
        """Shares as `Batch.shares` makes them, with the places of values in place of them."""
        shares = [self._share(laid, columns, mask) for laid in self._laid_shares(units, plan)]
        return [self._with_extra(share) for share in shares] if extra else shares

    def _share(self, laid: Share, columns: Sequence[str], mask: Tensor | None) -> StoredShare:
        rows, lengths = laid.rows.tolist(), laid.lengths.tolist()
        objects: list[Stored] = []
        numbers: dict[int, int] = {}

        def renumbered(of_responses: Integers, among: Sequence[Stored]) -> Integers:
            used, inverse = np.unique(of_responses, return_inverse=True)
            new = np.array([-1 if old < 0 else _listed(among[old], objects, numbers) for old in used.tolist()], np.int64)
            return new[inverse]

        known = self.columns
        local_mask = self._mask if mask is None else mask
        of_mask = local_mask is None and self.is_masked
        names = [name for name in columns if name in known.at] + ([MASK] if of_mask else [])
        stored = {
            name: (renumbered(known.at[name].of_row[laid.rows], known.at[name].objects), known.at[name].index)
            if not known.lies_beside_tokens(name)
            else (np.zeros(0, np.int64), 0)
            for name in names
        }
        flat = laid_rows(local_mask, rows, lengths) if local_mask is not None else laid.mask
        kept: dict[str, Any] = {entry.name: getattr(laid, entry.name) for entry in fields(Share)}
        kept |= {"mask": flat, "columns": {n: laid_rows(known.here[n], rows, lengths) for n in columns if n in known.here}}
        return StoredShare(
            **kept,
            tokens_in=renumbered(self._tokens_in[laid.rows], self._tokens),
            tokens_at=self._tokens_at[laid.rows],
            stored=stored,
            of_rows={name: known.of_rows[name].numpy()[laid.rows] for name in columns if name in known.of_rows},
            masked=of_mask,
            scored=int(flat.sum()) if local_mask is not None else int(self._counts[laid.rows].sum()),
            objects=tuple(objects),
        )


def _listed(stored: Stored, objects: list[Stored], numbers: dict[int, int]) -> int:
    """The number of a handle among `objects`, to which it is added if it is new; `numbers` are those by id."""
    number = numbers.setdefault(id(stored), len(objects))
    if number == len(objects):
        objects.append(stored)
    return number


def _with_further(column: StoredColumn, answers: Sequence[tuple[Stored, Sequence[int]]]) -> StoredColumn:
    """The column with the stored `Answers` for further rows."""
    of_row = column.of_row.copy()
    for number, (_, rows) in enumerate(answers, start=len(column.objects)):
        of_row[[*rows]] = number
    return StoredColumn((*column.objects, *(stored for stored, _ in answers)), of_row, column.index)


def batch_of(samples: Sequence[Sample]) -> Batch:
    """The samples as a batch: where their tokens are, if all of them lie in a store."""
    stored = [sample for sample in samples if isinstance(sample, StoredSample)]
    return StoredBatch(stored) if stored and len(stored) == len(samples) else Batch([sample.loaded() for sample in samples])
