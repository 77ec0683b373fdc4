"""A tracker of one's own: a table of chosen metrics for a spreadsheet. See docs/watching.md.

trackers:
  backends: ["examples/monitoring/csv_tracker.py:CsvTracker"]
  args:
    "examples/monitoring/csv_tracker.py:CsvTracker": {metrics: [reward/mean, kl/reference]}
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class CsvTracker:
    """Writes `chosen.csv` into the run folder, a line per step. A resumed run drops the lines of steps that it does again."""

    def __init__(
        self, config: Mapping[str, Any], folder: Path, resume_after_step: int | None, metrics: Sequence[str] = ("reward/mean",)
    ) -> None:
        path, self._metrics = folder / "chosen.csv", list(metrics)
        kept: list[list[str]] = []
        if resume_after_step is not None and path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.reader(file) if row[0].isdigit() and int(row[0]) <= resume_after_step]
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerow(["step", *self._metrics])
        self._writer.writerows(kept)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the chosen metrics of `step`; empty where the step has none."""
        self._writer.writerow([step, *(metrics.get(name, "") for name in self._metrics)])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
