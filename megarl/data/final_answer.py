"""The final statement of an answer: what stands behind its thoughts, the text of its `<answer>` tag, the boxes that it
gives."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2: the left upper corner and the right lower one."""

BOXES = 1000
"""Boxes of one answer at most; further ones are not read."""

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BRACE = re.compile(r"\\boxed\{|[{}]")
_NUMBER = r"\s{0,9}(-?\d{1,9}(?:\.\d{1,9})?)\s{0,9}"
_POINT = rf"\({_NUMBER},{_NUMBER}\)"
_LIST = rf"\[{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}\]"
_FORMS = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"""["']bbox(?:_2d)?["']\s{{0,9}}:\s{{0,9}}{_LIST}""",
        rf"(?:<box>|<\|box_start\|>)\s{{0,9}}{_POINT}\s{{0,9}},\s{{0,9}}{_POINT}",
        _LIST,
    )
)


def without_thoughts(response: str) -> str:
    """The text of a response behind its last `</think>`: nothing if it begins with `<think>` and was cut in its thoughts.

    What a policy considers is no answer: thoughts that name many would be paid for one of them.
    """
    _, closed, answer = response.rpartition("</think>")
    return "" if not closed and response.lstrip().startswith("<think>") else answer


def extract_answer(response: str) -> str:
    """The text of the last `<answer>...</answer>` behind the thoughts, or else all that is said behind them, stripped."""
    answer = without_thoughts(response)
    tagged = _ANSWER.findall(answer)
    return (tagged[-1] if tagged else answer).strip()


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces close, stripped; None if there is none."""
    span, opened = None, list[int | None]()
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[0] != "{" else None)
        elif opened and (start := opened.pop()) is not None and (span is None or start > span[0]):
            span = (start, brace.start())
    return None if span is None else text[slice(*span)].strip()


def read_boxes(given: Any) -> list[Box]:
    """The boxes in a text or a value of JSON, in their order; those of the first of these forms that it has.

    `"bbox_2d": [x1, y1, x2, y2]` (or `bbox`), `<box>(x1,y1),(x2,y2)</box>` (or `<|box_start|>`), and lists of
    four numbers. Of a text with `<answer>` tags the last one is read.
    """
    text = extract_answer(given) if isinstance(given, str) else json.dumps(given, default=str)
    for form in _FORMS:
        boxes = [tuple(map(float, match.groups())) for match in islice(form.finditer(text), BOXES)]
        if boxes:
            return [(x1, y1, x2, y2) for x1, y1, x2, y2 in boxes]
    return []
