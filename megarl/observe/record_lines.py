"""Checks of a line of JSON that a run wrote, or somebody else: figures by step, or any object with a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json

LARGEST = 2**53
"""Largest whole number that a float, and JavaScript, holds exactly."""
LineCheck = Callable[[bytes], dict[str, Any]]
"""Gives the object in a line; raises ValueError where that is not what the file holds."""


def object_line(line: bytes) -> dict[str, Any]:
    """The object in a line."""
    row = from_json(line)
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    return row


def metrics_line(line: bytes) -> dict[str, Any]:
    """The row in a line of `metrics.jsonl`: numbers by name, and `step`; names are kept once for all rows."""
    row = object_line(line)
    checked = {sys.intern(name): _metric(name, value) for name, value in row.items()}
    _step_of(row)
    return checked


def stepped_line(line: bytes) -> dict[str, Any]:
    """The object in a line of any file of steps: `step`, and whatever else."""
    row = object_line(line)
    _step_of(row)
    return row


def _metric(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else value
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{name[:60]} is a number of more than 64 bits")
    if value is None or isinstance(value, (int, float)):
        return value
    raise ValueError(f"{name[:60]} is no number")


def _step_of(row: dict[str, Any]) -> None:
    step = row.get("step")
    if type(step) is not int or not 0 <= step <= LARGEST:
        raise ValueError("it has no step" if step is None else "step is no number of a step")
