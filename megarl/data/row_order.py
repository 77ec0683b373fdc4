"""The order of one source's rows, epoch by epoch: shuffled, or as an option says."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.config.section import Section
from megarl.data.rows import Row, RowPlace
from megarl.option_list import functions

PlaceOf = Callable[[str], RowPlace]
"""The place of a row by its row id."""


class RowOrder:
    """The order of one source's rows, which are numbers from 0: shuffled anew in every epoch."""

    takes_pass_rates = False
    """Whether `record` changes which rows are due."""

    def __init__(self, rows: Sequence[tuple[str, Row]], rows_per_step: int, place_of: PlaceOf) -> None:
        """`rows`: row id and row. `rows_per_step`: rows that a step of the run takes. `place_of` names rows in errors."""
        self._size = len(rows)

    @property
    def stages(self) -> int:
        """Number of stages, at least one, each with rows of its own."""
        return 1

    def size_of(self, stage: int) -> int:
        """Rows of a stage."""
        return self._size

    def ends_after(self, stage: int) -> int | None:
        """Number of rows handed out in a stage; None: it is the last one."""
        return None

    def order(self, stage: int, epoch: int, seed: int | str) -> list[int]:
        """The rows of a stage in the order of an epoch; `epoch` counts those of all stages from 0."""
        order = list(range(self._size))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        return order

    def record(self, row_id: str, epoch: int, rate: float) -> None:
        """`rate`, from 0 to 1, is the share of right responses to the row in its visit of `epoch`."""

    def leaves_out(self, row_id: str, epoch: int) -> bool:
        """Return whether the row is not due in `epoch`."""
        return False

    def count_left_out(self, epoch: int) -> int:
        """Rows that are not due in `epoch`."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The pass rates that it remembers, JSON-able."""
        return {"rates": {}, "left_out_through": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what `state_dict` gave."""


OrderOf = Callable[[Sequence[tuple[str, Row]], int, PlaceOf], RowOrder]
"""Makes the order of a source's rows, of what `RowOrder` is made of."""


def order_by(data: Section) -> OrderOf:
    """The order that a section `data` asks for: that of an option, or `RowOrder`."""
    orders = (row_order(data) for row_order in functions("order", "row_order"))
    return next(filter(None, orders), RowOrder)
