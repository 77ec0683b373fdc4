"""`metrics.jsonl`: one JSON object per step, metric names grouped by `/` (`policy/loss`), each line flushed when written.

The file is the record of a run; the trackers only mirror it. Other records of steps have its form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.observe.growing_file import RowFile
from megarl.observe.kept_lines import keep_lines
from megarl.observe.record_lines import metrics_line, stepped_line

NESTED = ("distributions", "experts", "trace", "reward_errors")
"""Files of steps that hold other values than numbers."""


class MetricsFile:
    """Appends steps to a `metrics.jsonl`. A resumed run first drops the steps after its checkpoint: none is there twice."""

    def __init__(self, path: str | Path, *, resume_after_step: int | None = None) -> None:
        """Open `path`: anew if `resume_after_step` is None, else keeping the lines of steps up to that one."""
        self.path = Path(path)
        keep_lines(self.path, resume_after_step)
        self._file = self.path.open("a")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one step. Numbers JSON has no word for are written as the texts "nan", "inf" and "-inf"."""
        self._file.write(_line({"step": step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a `metrics.jsonl`, or of another file of steps by its name (none if there is no file).

    Lines that are damaged or foreign are left out, as is a last line that a crash has cut.
    """
    return RowFile(Path(path), stepped_line if Path(path).stem in NESTED else metrics_line).rows


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of `metrics`, tensors and numpy's among them, as Python numbers."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {name: value for name, value in plain.items() if isinstance(value, (int, float))}


def _line(metrics: Mapping[str, Any]) -> str:
    return json.dumps({key: _plain(value) for key, value in metrics.items()}, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # a tensor or numpy scalar
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
