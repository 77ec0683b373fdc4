"""The rows of a source that are due, and their order: by difficulty, in stages, without those whose pass rate is out of bounds.

Everything follows from the seed and from what `state_dict` of the sampler has, so that a resumed run goes on as if it had not
stopped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megarl.config.section import Section
from megarl.data.row_numbers import bounds_of, number_of
from megarl.data.row_order import OrderOf, PlaceOf, RowOrder
from megarl.data.rows import Row
from megarl.errors import DataError
from megarl.options.curriculum.section import CurriculumConfig, curriculum_of


class Curriculum(RowOrder):
    """The order of one source's rows; rows are numbers from 0."""

    def __init__(
        self, settings: CurriculumConfig, rows: Sequence[tuple[str, Row]], rows_per_step: int, place_of: PlaceOf
    ) -> None:
        """`rows`: row id and row. `rows_per_step`: rows that a step of the run takes, by which stages count their steps.

        Raises:
            DataError: a row has no number under `settings.key`, or a stage has no rows.
        """
        super().__init__(rows, rows_per_step, place_of)
        self.settings, self.takes_pass_rates = settings, settings.bounds_pass_rates
        self._difficulty: list[float] = []
        if settings.key is not None:
            self._difficulty = [number_of(row, settings.key, place_of(row_id), "data.curriculum.key") for row_id, row in rows]
        self._stages = [self._rows_of_stage(number) for number in range(len(settings.stages))] or [list(range(self._size))]
        self._rates: dict[str, float] = {}
        self._left_out_through: dict[str, int] = {}
        """By row id, the last epoch in which a row is left out."""
        steps = [stage.steps for stage in settings.stages]
        self._rows_of_stages = [None if count is None else count * rows_per_step for count in steps] or [None]

    def _rows_of_stage(self, number: int) -> list[int]:
        stage = self.settings.stages[number]
        low, high = bounds_of(stage.min, stage.max)
        rows = [row for row, value in enumerate(self._difficulty) if low <= value <= high]
        if not rows:
            raise DataError(
                f"data.curriculum.stages[{number}] has no rows: their '{self.settings.key}' is from {min(self._difficulty):g} "
                f"to {max(self._difficulty):g}, and it takes {low:g} to {high:g}"
            )
        return rows

    @property
    def stages(self) -> int:
        """Number of stages, at least one."""
        return len(self._stages)

    def size_of(self, stage: int) -> int:
        """Rows of a stage."""
        return len(self._stages[stage])

    def ends_after(self, stage: int) -> int | None:
        """Number of rows handed out in a stage; None: it is the last one."""
        return self._rows_of_stages[stage] if stage + 1 < len(self._stages) else None

    def order(self, stage: int, epoch: int, seed: int | str) -> list[int]:
        """The rows of a stage in the order of an epoch; `epoch` counts those of all stages from 0.

        Rows of equal difficulty are shuffled among themselves.
        """
        order = list(self._stages[stage])
        random.Random(f"{seed}/{epoch}").shuffle(order)
        by, epochs = self.settings.order, self.settings.ordered_epochs
        if by != "shuffled" and (epochs is None or epoch < epochs):
            order.sort(key=lambda row: self._difficulty[row], reverse=by == "descending")  # stable
        return order

    def record(self, row_id: str, epoch: int, rate: float) -> None:
        """`rate`, from 0 to 1, is the share of right responses to the row in its visit of `epoch`."""
        settings, old = self.settings, self._rates.get(row_id)
        new = rate if old is None else settings.pass_rate_memory * old + (1 - settings.pass_rate_memory) * rate
        self._rates[row_id] = new
        low, high = bounds_of(settings.min_pass_rate, settings.max_pass_rate)
        if not low <= new <= high:
            self._left_out_through[row_id] = epoch + settings.pause_epochs

    def leaves_out(self, row_id: str, epoch: int) -> bool:
        """Return whether the row is not due in `epoch`."""
        return epoch <= self._left_out_through.get(row_id, -1)

    def count_left_out(self, epoch: int) -> int:
        """Rows that are not due in `epoch`."""
        return sum(epoch <= last for last in self._left_out_through.values())

    def state_dict(self) -> dict[str, Any]:
        """The pass rates that it remembers, JSON-able."""
        return {"rates": dict(self._rates), "left_out_through": dict(self._left_out_through)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what `state_dict` gave."""
        self._rates, self._left_out_through = dict(state["rates"]), dict(state["left_out_through"])


def row_order(data: Section) -> OrderOf:
    """The order that `data.curriculum` describes."""
    return partial(Curriculum, curriculum_of(data))
