"""The choice of the rows of a step: every epoch visits each row once, in an order that follows from the seed and the epoch.

The state alone says where a run stands, so a resumed run goes on as if it had not stopped. A row is one prompt,
one sample, or all samples made from it (the two sides of a pair): they are handed out together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from megarl.config.sources import OnChange
from megarl.data.row_changes import digest_of, row_hashes, way_on
from megarl.data.row_order import OrderOf, PlaceOf, RowOrder
from megarl.data.rows import Origin, RowPlace
from megarl.data.sample import Prompt, Sample
from megarl.errors import CheckpointError

Record = TypeVar("Record", Prompt, Sample)


class DataSampler(Protocol[Record]):
    """Hands out rows without end, and can be saved."""

    def next(self, n: int) -> list[Record]:
        """The records of the next `n` rows, as copies whose `group_id` is unique to this visit of the row."""

    def record(self, pass_rates: Mapping[str, float]) -> None:
        """By `group_id`, the share of right responses; rows may be left out for it from their next epoch on."""

    @property
    def takes_pass_rates(self) -> bool:
        """Return whether `record` changes which rows are due."""

    def figures(self) -> dict[str, float]:
        """Metrics of the order: the rows that are left out of the present epoch for their pass rate."""

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able."""

    def load_state_dict(self, state: dict[str, Any], on_change: OnChange = "refuse") -> list[str]:
        """Go to where `state_dict()` was taken, or as `on_change` says if that was over other data, and return what is to be
        said of it; CheckpointError if it may not go on."""


class RowSampler(Generic[Record]):
    """Hands out rows epoch after epoch, without end."""

    def __init__(
        self,
        records: Sequence[Record],
        seed: int | str,
        field: str = "data.train",
        order: OrderOf = RowOrder,
        rows_per_step: int = 1,
        place_of: PlaceOf | None = None,
    ) -> None:
        """`records` must not be empty; those of one `row_id` are one row. `seed` decides the order of every epoch.

        `field` is the config field that the records come from, for errors. The others are those of `build_sampler`.
        """
        if not records:
            raise ValueError("a sampler needs at least one record")
        rows: dict[str, list[Record]] = {}
        for record in records:
            rows.setdefault(record.row_id, []).append(record)
        self._rows: list[list[Record]] = list(rows.values())
        self._row_ids = set(rows)
        places = place_of or (lambda row_id: RowPlace(Origin(field), int(row_id.rpartition("-")[2])))
        pairs = [(name, of_row[0].row) for name, of_row in rows.items()]
        self._order_of_first: Callable[[int], RowOrder] = lambda count: order(pairs[:count], rows_per_step, places)
        self._order = order(pairs, rows_per_step, places)
        self._hashes = row_hashes((of_row[0] for of_row in self._rows), places)  # now: rewards may write into rows
        self._seed = seed
        self._field, self._rows_per_step = field, rows_per_step
        self._grown: Sequence[Any] = (-1, [])
        """An epoch in which rows were added, and how many there were before each time."""
        self._stage = self._taken_in_stage = 0
        self._position = 0
        """In the sequence of the stage's epochs, rows that were left out included."""
        self._epochs_before = 0
        """Epochs of earlier stages."""
        self._has_handed_out = True
        """Whether the epoch gave a row already: so it is wherever a state is taken, but before an epoch's first row."""
        self._shown: tuple[int, list[int]] = (-1, [])
        """An epoch and its order."""

    def next(self, n: int) -> list[Record]:
        """The next `n` rows as copies whose `group_id` is `<row_id>@<epoch>`: unique, however often a row comes back."""
        return [record for _ in range(n) for record in self._take()]

    def record(self, pass_rates: Mapping[str, float]) -> None:
        """See `DataSampler`; group ids of other samplers are none of its business."""
        for group_id, rate in pass_rates.items():
            row_id, _, epoch = group_id.rpartition("@")
            if row_id in self._row_ids:
                self._order.record(row_id, int(epoch), rate)

    @property
    def takes_pass_rates(self) -> bool:
        """See `DataSampler`."""
        return self._order.takes_pass_rates

    def figures(self) -> dict[str, float]:
        """See `DataSampler`."""
        return {"curriculum/left_out": self._order.count_left_out(self._epochs_before + self._place()[0])}

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able, and the number and digest of the rows that give it its meaning."""
        return {
            "position": self._position,
            "rows": len(self._rows),
            "digest": digest_of(self._hashes),
            "rows_per_step": self._rows_per_step,
            "stage": self._stage,
            "taken_in_stage": self._taken_in_stage,
            "epochs_before": self._epochs_before,
            "epoch": self._epochs_before + self._place()[0],
            "grown": self._grown,
            "pass_rates": self._order.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], on_change: OnChange = "refuse") -> list[str]:
        """Go to a saved position, as `on_change` says where it was in other rows; returns what is to be said of it.

        Raises:
            CheckpointError: the state was saved over other rows, or over a mixture, and `on_change` does not allow it.
        """
        if "parts" in state:
            if on_change == "restart":
                return [f"{self._field} was a mixture in the checkpoint: it begins with its first row (data.on_change)"]
            raise CheckpointError(
                f"{self._field} is a single source, and a mixture of {len(state['parts'])} parts in the checkpoint; "
                "a resumed run must have the same data, unless data.on_change is 'restart'"
            )
        way, lines = way_on(self._field, self._hashes, state, on_change)
        self._shown, self._has_handed_out, self._grown = (-1, []), True, (-1, [])
        if way == "restart":  # in an epoch that was not yet, so that no visit of a row has the id of an earlier one
            self._stage = self._taken_in_stage = self._position = 0
            self._epochs_before = state.get("epoch", state["position"] // state["rows"]) + 1
            return lines
        self._position = state["position"]
        if "stage" not in state:  # an earlier version's, which had no curricula
            self._stage, self._epochs_before, self._taken_in_stage = 0, 0, self._position
        elif state["stage"] >= self._order.stages:
            raise CheckpointError(
                f"data.curriculum has {self._order.stages} stages, and the checkpoint is in number {state['stage'] + 1}; "
                "a resumed run must have the same curriculum"
            )
        else:  # stages are counted in steps: so many rows as they would have taken by now
            self._stage, self._epochs_before = state["stage"], state["epochs_before"]
            before = state.get("rows_per_step", self._rows_per_step)
            self._taken_in_stage = state["taken_in_stage"] * self._rows_per_step // before
            self._order.load_state_dict(state["pass_rates"])
            self._grown = state.get("grown", self._grown)
        if way == "append":
            self._grow(state["rows"])
        return lines

    def _grow(self, before: int) -> None:
        """Have the present epoch go on with the rows behind the first `before`, once these have been handed out."""
        size = self._order_of_first(before).size_of(self._stage)
        of_stage, position = divmod(self._position, size)
        if position == 0 and of_stage:  # at the end of an epoch: the new rows are what is left of it
            of_stage, position = of_stage - 1, size
        self._epochs_before, self._position = self._epochs_before + of_stage, position
        if position:
            earlier: list[int] = self._grown[1] if self._grown[0] == self._epochs_before else []
            self._grown = (self._epochs_before, [*earlier, before])

    def _order_in(self, epoch: int) -> list[int]:
        """The rows of an epoch in order: all, or, if some were added in it, those of before and then the others."""
        counts: list[int] = self._grown[1] if self._grown[0] == epoch else []
        order: list[int] = []
        for first, count in zip([0, *counts], counts, strict=False):
            of_first = self._order_of_first(count).order(self._stage, epoch, self._seed)
            order += [row for row in of_first if row >= first]
        behind = counts[-1] if counts else 0
        return order + [row for row in self._order.order(self._stage, epoch, self._seed) if row >= behind]

    def _place(self) -> tuple[int, int]:
        """The epoch of the stage, and the place in its order, of the next row."""
        return divmod(self._position, self._order.size_of(self._stage))

    def _take(self) -> list[Record]:
        if (ends_after := self._order.ends_after(self._stage)) is not None and self._taken_in_stage >= ends_after:
            self._epochs_before += -(-self._position // self._order.size_of(self._stage))
            self._stage += 1
            self._taken_in_stage = self._position = 0
        while True:
            of_stage, position = self._place()
            epoch = self._epochs_before + of_stage
            if position == 0:
                self._has_handed_out = False
            if self._shown[0] != epoch:
                self._shown = (epoch, self._order_in(epoch))
            records = self._rows[self._shown[1][position]]
            self._position += 1
            # an epoch of which every row is left out ends with its last row: there is always one to hand out
            is_last_chance = position == len(self._shown[1]) - 1 and not self._has_handed_out
            if is_last_chance or not self._order.leaves_out(records[0].row_id, epoch):
                break
        self._has_handed_out = True
        self._taken_in_stage += 1
        return [replace(record, group_id=f"{record.row_id}@{epoch}") for record in records]
