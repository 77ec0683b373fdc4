"""Which cells of a matrix `make test` computes. A cell is a layout and a family, as it is or with recomputation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from tests.themes.parallel.worlds import MODES

Cell = tuple[str, str]


def matrix(
    cells: Iterable[Cell],
    in_every_run: Collection[Cell],
    recomputed: Collection[Cell] = (),
    modes: Sequence[str] = tuple(MODES),
) -> list[Any]:
    """Parameters (layout, family, those of `modes` without recomputation, or with it); what is in neither set is exhaustive.

    Recomputation does the same in each layer of a family, and of a layout only the messages are done again: a few cells stand
    for the others, of each kind of parallelism one.
    """
    plain = tuple(name for name in modes if MODES[name].recompute == "none")
    again = tuple(name for name in modes if MODES[name].recompute != "none")
    return [
        pytest.param(*cell, names, id=f"{cell[1]}-{cell[0]}{said}", marks=() if cell in chosen else pytest.mark.exhaustive)
        for cell in cells
        for names, said, chosen in ((plain, "", in_every_run), (again, ", recomputed", recomputed))
        if names
    ]
