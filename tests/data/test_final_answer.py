"""Boxes are read from every form that models and data sets give them in."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megarl.data.final_answer import BOXES, read_boxes


@pytest.mark.parametrize(
    ("given", "boxes"),
    [
        ('```json\n[{"bbox_2d": [10, 20, 30.5, 40], "label": "cat"}]\n```', [(10, 20, 30.5, 40)]),
        ("{'bbox_2d': [1,2,3,4]} {'bbox_2d': [5,6,7,8]} or [9, 9, 9, 9]", [(1, 2, 3, 4), (5, 6, 7, 8)]),
        ('{"bbox" : [1, 2, 3, 4]}', [(1, 2, 3, 4)]),
        ("<ref>cat</ref><box>(10,20),(30,40)</box><box>( 1 , 2 ),(3,4)</box>", [(10, 20, 30, 40), (1, 2, 3, 4)]),
        ("<|box_start|>(10,20),(30,40)<|box_end|>", [(10, 20, 30, 40)]),
        ("It is at [1, 2, 3, 4], not (5,6),(7,8)", [(1, 2, 3, 4)]),
        ("[[1,2,3,4],[5,6,7,8]]", [(1, 2, 3, 4), (5, 6, 7, 8)]),
        ("<think>[9, 9, 10, 10]</think><answer>[1, 2, 3, 4]</answer>", [(1, 2, 3, 4)]),
        ([1, 2, 3, 4.5], [(1, 2, 3, 4.5)]),
        ([[1, 2, 3, 4], [-5, 6, 7, 8]], [(1, 2, 3, 4), (-5, 6, 7, 8)]),
        ({"bbox_2d": [1, 2, 3, 4]}, [(1, 2, 3, 4)]),
        ("[1, 2, 3]", []),
        ("[1, 2, 3, 4, 5]", []),
        ("[1e3, 2, 3, 4]", []),
        ("", []),
        (None, []),
        (7, []),
    ],
)
def test_boxes_are_read(given: Any, boxes: list[tuple[float, ...]]) -> None:
    assert read_boxes(given) == boxes


def test_a_hostile_answer_costs_little() -> None:
    started = time.monotonic()
    assert len(read_boxes("[1,2,3,4]" * 50_000)) == BOXES
    for piece in ("[1,2,3,", "<box>(1,", "9" * 9, " ", '"bbox_2d":', "["):
        assert read_boxes(piece * 100_000) == []
    assert time.monotonic() - started < 10
