"""Which rows a step gets: every epoch visits each row once, in an order that follows from the seed and the epoch.

The position alone says where a run stands, so a resumed run goes on as if it had not stopped. A row is one prompt,
one sample, or all samples made from it (the two sides of a pair): they are handed out together.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from megarl.data.sample import Prompt, Sample
from megarl.errors import CheckpointError, DataError

Record = TypeVar("Record", Prompt, Sample)


class DataSampler(Protocol[Record]):
    """Hands out rows without end, and can be saved."""

    def next(self, n: int) -> list[Record]:
        """The records of the next `n` rows, as copies whose `group_id` is unique to this visit of the row."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, JSON-able."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict()` was taken; CheckpointError if that was over other data."""


def build_sampler(parts: Sequence[Sequence[Record]], weights: Sequence[float], seed: int) -> DataSampler[Record]:
    """The sampler of a data set: of its only part, or of several `parts` by their `weights` (one each, above 0)."""
    return RowSampler(parts[0], seed) if len(parts) == 1 else MixtureSampler(parts, weights, seed)


class RowSampler(Generic[Record]):
    """Hands out rows epoch after epoch, without end."""

    def __init__(self, records: Sequence[Record], seed: int | str, field: str = "data.train") -> None:
        """`records` must not be empty; those of one `row_id` are one row. `seed` decides the order of every epoch.

        `field` is the config field that the records come from, for errors.
        """
        if not records:
            raise ValueError("a sampler needs at least one record")
        rows: dict[str, list[Record]] = {}
        for record in records:
            rows.setdefault(record.row_id, []).append(record)
        self._rows: list[list[Record]] = list(rows.values())
        self._seed = seed
        self._field = field
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []

    def next(self, n: int) -> list[Record]:
        """The next `n` rows as copies whose `group_id` is `<row_id>@<epoch>`: unique, however often a row comes back."""
        return [record for _ in range(n) for record in self._take()]

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able, and the number of rows that gives it its meaning."""
        return {"position": self._position, "rows": len(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            CheckpointError: the state was saved over another number of rows, or over a mixture.
        """
        if "parts" in state:
            raise CheckpointError(
                f"{self._field} is a single source, and a mixture of {len(state['parts'])} parts in the checkpoint; "
                "a resumed run must have the same data"
            )
        if state["rows"] != len(self._rows):
            raise CheckpointError(
                f"{self._field} has {len(self._rows)} rows, and {state['rows']} in the checkpoint; "
                "a resumed run must have the same data"
            )
        self._position = state["position"]

    def _take(self) -> list[Record]:
        epoch, place = divmod(self._position, len(self._rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._rows)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        self._position += 1
        return [replace(record, group_id=f"{record.row_id}@{epoch}") for record in self._rows[self._order[place]]]


class MixtureSampler(Generic[Record]):
    """Draws each row from one of several parts, by weight; every part goes through its own epochs in its own order.

    Draw k picks its part by the seed and k alone, and the part gives its next row: no row is skipped, whatever the
    weights, and the draw counter with the parts' positions is all there is to save.
    """

    def __init__(self, parts: Sequence[Sequence[Record]], weights: Sequence[float], seed: int) -> None:
        """`parts` and `weights` are of one length; weights are above 0 and need not sum to 1."""
        self._parts: list[RowSampler[Record]] = [
            RowSampler(part, f"{seed}/{number}", f"data.train.parts[{number}]") for number, part in enumerate(parts)
        ]
        self._weights = list(weights)
        self._seed = seed
        self._draws = 0
        if len(self._weights) != len(self._parts) or min(self._weights) <= 0:
            raise ValueError(f"a mixture of {len(self._parts)} parts needs as many weights above 0, got {self._weights}")

    def next(self, n: int) -> list[Record]:
        """The records of the next `n` rows; `group_id` is `<row_id>@<epoch of its part>`."""
        return [record for _ in range(n) for record in self._draw()]

    def state_dict(self) -> dict[str, Any]:
        """The number of draws so far, and where every part stands."""
        return {"draws": self._draws, "parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            CheckpointError: the state was saved over other parts.
        """
        saved = len(state.get("parts", [None]))
        if saved != len(self._parts):
            raise CheckpointError(
                f"data.train has {len(self._parts)} parts, and {saved} in the checkpoint; a resumed run must have the same data"
            )
        for part, position in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(position)
        self._draws = state["draws"]

    def _draw(self) -> list[Record]:
        chosen = random.Random(f"{self._seed}/draw {self._draws}").choices(self._parts, self._weights)[0]
        self._draws += 1
        return chosen.next(1)


def drop_eval_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """The training prompts that are not, token for token and picture for picture, held-out prompts.

    Raises:
        DataError: none is left.
    """
    known = {(tuple(prompt.prompt_ids), tuple(prompt.media)) for prompt in held_out}
    kept = [prompt for prompt in train if (tuple(prompt.prompt_ids), tuple(prompt.media)) not in known]
    if not kept:
        raise DataError(
            f"data.train has no row that data.eval and evaluations do not hold out ({len(train)} rows, all of them held-out "
            "prompts); train on other rows, or remove those sets"
        )
    return kept
