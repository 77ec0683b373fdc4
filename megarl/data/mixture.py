"""The records of a source and of the parts of a mixture, with the weights that a sampler draws them by, and that sampler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from megarl.data.prompts import parts_of
from megarl.data.row_order import OrderOf, PlaceOf, RowOrder
from megarl.data.rows import DataSource, Origin, Row, RowPlace
from megarl.data.sampler import DataSampler, Record, RowSampler


class RowBuilder(Protocol[Record]):
    """A maker of records from rows: a `PromptBuilder` or a `SupervisedBuilder`."""

    def build(self, rows: Iterable[Row | None], *, prefix: str, origin: Origin | None = None) -> list[Record]:
        """The records of `rows`, whose row ids begin with `prefix`."""


def build_parts(
    builder: RowBuilder[Record], source: DataSource, *, prefix: str, section: str | None = None
) -> list[list[Record]]:
    """The records of every part of a mixture, row ids `<prefix>-<part>-<row>`; of another source, of its only part.

    Raises:
        DataError: a source or a row cannot be used, named as `section` (None: `data.<prefix>`) or one of its parts.
    """
    parts, section = parts_of(source), section or f"data.{prefix}"
    if source.source != "mixture":
        return [builder.build(parts[0], prefix=prefix, origin=Origin(section, source))]
    return [
        builder.build(rows, prefix=f"{prefix}-{number}", origin=Origin(f"{section}.parts[{number}]", part))
        for number, (part, rows) in enumerate(zip(source.parts, parts, strict=True))
    ]


def mixture_weights(source: DataSource) -> list[float | Mapping[int, float]]:
    """One weight per part that `build_parts` gives."""
    if source.source != "mixture":
        return [1.0]
    return [part.weight_by_step or part.weight for part in source.parts]


def place_of_row(row_id: str, source: DataSource, section: str = "data.train") -> RowPlace:
    """The place of the row that `build_parts` gave `row_id`."""
    *_, part, number = f"0-{row_id}".split("-")
    if source.source != "mixture":
        return RowPlace(Origin(section, source), int(number))
    return RowPlace(Origin(f"{section}.parts[{part}]", source.parts[int(part)]), int(number))


def build_sampler(
    parts: Sequence[Sequence[Record]],
    weights: Sequence[float | Mapping[int, float]],
    seed: int,
    order: OrderOf = RowOrder,
    rows_per_step: int = 1,
    place_of: PlaceOf | None = None,
    field: str = "data.train",
) -> DataSampler[Record]:
    """The sampler of a data set: of its only part, or of several `parts` by their `weights` (one each, above 0).

    Args:
        parts: records by part of a mixture.
        weights: one for each part.
        seed: the run's.
        order: in which order rows come, and which are left out.
        rows_per_step: rows that a step takes; steps of stages and weights are counted by the rows handed out.
        place_of: names a row by its row id in errors.
        field: the config field that the records come from.

    Raises:
        DataError: a row has no difficulty, or a stage of the curriculum has no rows.
    """
    if len(parts) == 1:
        return RowSampler(parts[0], seed, field, order, rows_per_step, place_of)
    from megarl.data.mixture_sampler import MixtureSampler  # of no use to any other run

    return MixtureSampler(parts, weights, seed, order, rows_per_step, place_of, field)
