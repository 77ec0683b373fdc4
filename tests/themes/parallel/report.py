"""The parity matrix as a table: the worst deviation per layout and family, written between two marks of a document."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import megatron.core
import torch
import transformers


class Report:
    """Collects cells; `write` makes a table of those that a run has filled, between the marks of `name` in a document."""

    def __init__(self, name: str) -> None:
        self._marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        self._worst: dict[tuple[str, str], tuple[float, float]] = {}
        self._modes: list[str] = []

    def add(self, layout: str, family: str, mode: str, of_values: float, of_gradients: float) -> None:
        """Keep the worst deviations of a cell over its modes."""
        values, gradients = self._worst.get((layout, family), (0.0, 0.0))
        self._worst[layout, family] = (max(values, of_values), max(gradients, of_gradients))
        if mode not in self._modes:
            self._modes.append(mode)

    def table(self) -> str:
        """Markdown: a row per layout, a column per family, `log-probs / gradients` in each cell."""
        families = list(dict.fromkeys(family for _, family in self._worst))
        lines = [
            f"Measured {datetime.now(UTC):%Y-%m-%d}: megatron-core {megatron.core.__version__}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, Python {platform.python_version()}; each cell is the worst of "
            f"{len(self._modes)} modes ({'; '.join(self._modes)}).",
            "",
            "| layout | " + " | ".join(families) + " |",
            "|---|" + "---|" * len(families),
        ]
        for layout in dict.fromkeys(layout for layout, _ in self._worst):
            cells = [self._worst.get((layout, family)) for family in families]
            lines.append(f"| {layout} | " + " | ".join(f"{c[0]:.1e} / {c[1]:.1e}" if c else "–" for c in cells) + " |")
        return "\n".join(lines)

    def write(self, document: Path) -> None:
        """Put the table between its marks in `document`, if there is any."""
        if not self._worst:
            return
        begin, end = self._marks
        before, rest = document.read_text().split(begin)
        after = rest.split(end)[1]
        document.write_text(f"{before}{begin}\n{self.table()}\n{end}{after}")
