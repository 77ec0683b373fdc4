"""The names in docs/metrics.md, which every run of the end-to-end tests is held against."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@cache
def documented() -> dict[str, str]:
    """By pattern of a name, its unit. `<phase>` stands for any name; names in a cell share its units or have one each."""
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        names = re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_<>@]+)+)`", cells[0]) if line.startswith("| `") else []
        if names:
            assert len(cells) == 3, f"{PAGE.name} has a row without name, unit and meaning: {line}"
            units = cells[1].split(", ")
            assert len(units) in (1, len(names)), f"{PAGE.name} has {len(units)} units for {len(names)} names: {line}"
            for place, name in enumerate(names):
                found[re.sub(r"<\w+>", r"[\\w.-]+", name)] = units[place if len(units) > 1 else 0]
    return found


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of `names` that the page does not have."""
    return sorted({name for name in names if name != "step" and not any(re.fullmatch(p, name) for p in documented())})
