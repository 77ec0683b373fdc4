"""Figures in benchmarks/results/: what is read for a table, when it was measured, and which is older than its code."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
sys.path.insert(0, str(ROOT / "benchmarks"))

from measured_code import digest  # noqa: E402

Figures = Any
"""What a benchmark wrote."""
READ: list[str] = []
"""Names of the figures that tables were made of."""


def result(name: str) -> Figures:
    """The committed figures of this name, for a table."""
    READ.append(name)
    return figures_of(name)


@cache
def figures_of(name: str) -> Figures:
    """The committed figures of this name."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured_on(name: str) -> str:
    """The day on which the figures of this name were taken, `2026-11-29`."""
    found = figures_of(name)
    return str(found.get("date") or found["machine"]["date"])[:10]


def older_than_their_code() -> list[str]:
    """A line for each file of figures whose benchmark or measured code is not today's."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        found = figures_of(path.stem)
        changed = _changed(found.get("code", {}))
        if changed:
            lines.append(f"benchmarks/results/{path.name}: measured before {', '.join(dict.fromkeys(changed))} changed")
    return lines


def _changed(code: dict[str, str]) -> list[str]:
    return [place for place, then in code.items() if digest(place) != then]
