"""The example sources of pictures: an answer says what the picture shows, rows follow from their seed, splits do not meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.config.sections import SourceConfig
from megarl.data.prompts import load_rows


def _shapes(**args: Any) -> list[dict[str, Any]]:
    return load_rows(SourceConfig(source="python", name="examples/vision/shapes.py:count_shapes", args=args))


def _regions(picture: Any) -> int:
    """Connected regions (side by side or corner to corner) of what is not white."""
    left = {(int(y), int(x)) for y, x in np.argwhere((np.asarray(picture) != 255).any(axis=2))}
    count = 0
    while left:
        count += 1
        open_points = [left.pop()]
        while open_points:
            y, x = open_points.pop()
            near = {(y + down, x + right) for down in (-1, 0, 1) for right in (-1, 0, 1)} & left
            left -= near
            open_points += near
    return count


def test_an_answer_is_the_number_of_shapes() -> None:
    rows = _shapes(rows=60) + _shapes(rows=5, most=9, size=56)
    assert [int(row["answer"]) for row in rows] == [_regions(row["images"][0]) for row in rows]
    assert {row["answer"] for row in rows[:60]} == set("12345")
    assert rows[0]["problem"] == "<image>How many shapes?"
    assert rows[-1]["images"][0].size == (56, 56)


def test_a_row_of_shapes_follows_from_its_seed() -> None:
    first, again, later = _shapes(rows=6), _shapes(rows=6), _shapes(rows=3, seed=3)
    assert [row["images"][0].tobytes() for row in first] == [row["images"][0].tobytes() for row in again]
    assert [row["images"][0].tobytes() for row in first[3:]] == [row["images"][0].tobytes() for row in later]
    assert len({row["images"][0].tobytes() for row in first}) == 6


def test_digits_are_split_and_whole() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    name = "examples/vision/digits.py:digits"
    train, held_out = (
        load_rows(SourceConfig(source="python", name=name, args={"split": split})) for split in ("train", "held_out")
    )
    found = datasets.load_digits()
    assert (len(train), len(held_out)) == (1500, 297)
    assert [int(row["answer"]) for row in train + held_out] == found.target.tolist()
    assert train[0]["images"][0].size == (56, 56)
    shown = np.asarray(held_out[-1]["images"][0])[3::7, 3::7, 0]  # the middle of each of the 8 x 8 squares
    np.testing.assert_array_equal(shown, np.round(found.images[-1] * 255 / 16))
