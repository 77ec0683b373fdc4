"""Which cells of a matrix `make test` computes. A cell is a layout and a family: packed, one by one, or with recomputation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from tests.themes.parallel.worlds import MODES

Cell = tuple[str, str]


def matrix(
    cells: Iterable[Cell],
    packed: Collection[Cell],
    one_by_one: Collection[Cell] = (),
    recomputed: Collection[Cell] = (),
    modes: Sequence[str] = tuple(MODES),
) -> list[Any]:
    """Parameters (layout, family, those of `modes` of one kind); a cell that is not in the set of its kind is exhaustive.

    One by one a pass has a dozen micro-batches in place of two, and what is recomputed is computed twice: of a layout, only
    the messages are then sent again. A few cells stand for the others, of each kind of parallelism one.
    """

    def names(recomputes: bool, packs: Collection[bool]) -> tuple[str, ...]:
        return tuple(n for n in modes if (MODES[n].recompute != "none") == recomputes and MODES[n].packed in packs)

    kinds = (
        ("", names(False, {True}), packed),
        (", one by one", names(False, {False}), one_by_one),
        (", recomputed", names(True, {True, False}), recomputed),
    )
    return [
        pytest.param(*cell, of_kind, id=f"{cell[1]}-{cell[0]}{said}", marks=() if cell in chosen else pytest.mark.exhaustive)
        for cell in cells
        for said, of_kind, chosen in kinds
        if of_kind
    ]
