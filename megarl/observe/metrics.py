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
from megarl.system.atomic_files import write_text_atomically


class MetricsFile:
    """Appends steps to a `metrics.jsonl`. A resumed run first drops the steps after its checkpoint: none is there twice."""

    def __init__(self, path: str | Path, *, resume_after_step: int | None = None) -> None:
        """Open `path`: anew if `resume_after_step` is None, else keeping the lines of steps up to that one."""
        self.path = Path(path)
        earlier = [] if resume_after_step is None else [m for m in read_metrics(path) if m["step"] <= resume_after_step]
        write_text_atomically(self.path, "".join(_line(metrics) for metrics in earlier))
        self._file = self.path.open("a")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one step. Numbers JSON has no word for are written as the texts "nan", "inf" and "-inf"."""
        self._file.write(_line({"step": step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a `metrics.jsonl` (none if there is no file); a last line cut off by a crash is left out."""
    return RowFile(Path(path)).rows


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
