"""Numbers in rows: read with the field that asks for them, and held against bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from megarl.data.rows import Row, RowPlace, value_of
from megarl.errors import DataError

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def number_of(row: Row, key: str, place: RowPlace, field: str) -> float:
    """The number under `key`, which may be written as text.

    Raises:
        DataError: there is none.
    """
    value = value_of(row, key, field, place)
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):  # as cells of CSV have it
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise DataError(f"{place} has {value!r:.80} under '{key}' ({field}); it must be a number")
    return float(value)


def is_kept(row: Row, keep: Mapping[str, tuple[float | None, float | None]], place: RowPlace) -> bool:
    """Return whether the numbers of `row` under the keys of `keep` are within their bounds (None: no bound).

    Raises:
        DataError: one of them is no number.
    """
    for key, bounds in keep.items():
        low, high = bounds_of(*bounds)
        if not low <= number_of(row, key, place, "keep") <= high:
            return False
    return True


def bounds_of(low: float | None, high: float | None) -> tuple[float, float]:
    """The bounds as numbers; None: there is none."""
    return -math.inf if low is None else low, math.inf if high is None else high
