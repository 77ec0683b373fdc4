"""The choice of rows from the parts of a mixture, by weights that may change from step to step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Generic

from megarl.config.sources import OnChange, weight_at
from megarl.data.row_order import OrderOf, PlaceOf, RowOrder
from megarl.data.sampler import Record, RowSampler
from megarl.errors import CheckpointError

Weight = float | Mapping[int, float]
"""Weight of a part of a mixture: the same at every step, or by step, linear between the steps given and constant outside."""


class MixtureSampler(Generic[Record]):
    """Draws each row from one of several parts, by weight; every part goes through its own epochs in its own order.

    Draw k picks its part by the seed and k alone, and the part gives its next row: no row is skipped, whatever the
    weights, and the draw counter with the parts' positions is all there is to save.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Record]],
        weights: Sequence[Weight],
        seed: int,
        order: OrderOf = RowOrder,
        rows_per_step: int = 1,
        place_of: PlaceOf | None = None,
        field: str = "data.train",
    ) -> None:
        """`parts` and `weights` are of one length; weights are above 0 and need not sum to 1.

        A weight by step may be 0, but not those of all parts at the same step. The others are those of `build_sampler`.
        """
        self._parts: list[RowSampler[Record]] = [
            RowSampler(part, f"{seed}/{number}", f"{field}.parts[{number}]", order, rows_per_step, place_of)
            for number, part in enumerate(parts)
        ]
        self._weights = [dict(weight) if isinstance(weight, Mapping) else {0: weight} for weight in weights]
        self._seed, self._rows_per_step, self._field = seed, rows_per_step, field
        self._draws = 0
        self._steps_from: tuple[int, int] = (0, 0)
        """A number of draws and the step of the run that it was: from there on steps have `rows_per_step` draws."""
        steps = {step for weight in self._weights for step in weight}
        never = any(not isinstance(weight, Mapping) and weight <= 0 for weight in weights)
        if (
            len(weights) != len(parts)
            or never
            or any(not any(weight_at(weight, step) for weight in self._weights) for step in steps)
        ):
            raise ValueError(f"a mixture of {len(self._parts)} parts needs as many weights above 0, got {weights}")

    def next(self, n: int) -> list[Record]:
        """The records of the next `n` rows; `group_id` is `<row_id>@<epoch of its part>`."""
        return [record for _ in range(n) for record in self._draw()]

    def record(self, pass_rates: Mapping[str, float]) -> None:
        """See `DataSampler`."""
        for part in self._parts:
            part.record(pass_rates)

    @property
    def takes_pass_rates(self) -> bool:
        """See `DataSampler`."""
        return self._parts[0].takes_pass_rates

    def figures(self) -> dict[str, float]:
        """See `DataSampler`."""
        of_parts = [part.figures() for part in self._parts]
        return {name: sum(figures[name] for figures in of_parts) for name in of_parts[0]}

    def state_dict(self) -> dict[str, Any]:
        """The number of draws so far, what they were in steps, and where every part stands."""
        return {
            "draws": self._draws,
            "rows_per_step": self._rows_per_step,
            "steps_from": self._steps_from,
            "parts": [part.state_dict() for part in self._parts],
        }

    def load_state_dict(self, state: dict[str, Any], on_change: OnChange = "refuse") -> list[str]:
        """Go to a saved place, as `on_change` says where it was in other rows; returns what is to be said of it.

        Raises:
            CheckpointError: the state was saved over other parts, and `on_change` does not allow it.
        """
        saved, now = len(state.get("parts", [None])), len(self._parts)
        if "parts" not in state or saved > now or (saved < now and on_change == "refuse"):
            if on_change == "restart":
                return [f"{self._field} has {now} parts, and {saved} in the checkpoint: it begins anew (data.on_change)"]
            raise CheckpointError(
                f"{self._field} has {now} parts, and {saved} in the checkpoint; a resumed run must have the same data, unless "
                "data.on_change is 'restart', or 'append' where parts are added behind the others"
            )
        pairs = zip(self._parts, state["parts"], strict=False)
        lines: list[str] = [line for part, position in pairs for line in part.load_state_dict(position, on_change)]
        self._draws = state["draws"]
        draws, step = state.get("steps_from", (0, 0))
        before = state.get("rows_per_step", self._rows_per_step)
        if before != self._rows_per_step:
            draws, step = self._draws, step + (self._draws - draws) // before
        self._steps_from = (draws, step)
        lines += [f"{self._field}.parts[{number}] is new: it begins with its first row" for number in range(saved, now)]
        return lines

    def _draw(self) -> list[Record]:
        draws, first = self._steps_from
        step = first + (self._draws - draws) // self._rows_per_step
        weights = [weight_at(weight, step) for weight in self._weights]
        chosen = random.Random(f"{self._seed}/draw {self._draws}").choices(self._parts, weights)[0]
        self._draws += 1
        return chosen.next(1)
