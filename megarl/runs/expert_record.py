"""`experts.jsonl`: a line per step with what the updates' routers chose, for models with experts."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from megarl.observe import MetricsFile
from megarl.observe.expert_load import EXPERTS, LayerRouting, experts_line


class ExpertRecord:
    """Collects what the updates of a step routed, by role, and writes it when the step is done."""

    def __init__(self, path: Path | None, resume_after_step: int | None) -> None:
        """`path` is the file, made with its first line; None: nothing is written. A resumed run drops later steps from it."""
        self._path, self._after = path, resume_after_step
        self._file: MetricsFile | None = None
        self._updates: dict[str, list[dict[int, LayerRouting]]] = {}

    def take(self, role: str, metrics: MutableMapping[str, Any]) -> None:
        """Take what one update of `role` routed out of its metrics, if there is any."""
        routed = metrics.pop(EXPERTS, None)
        if routed:
            self._updates.setdefault(role, []).append(routed)

    def begin_step(self) -> None:
        """Forget what updates since the last line routed."""
        self._updates = {}

    def write(self, step: int) -> None:
        """Write the line of a step; none if no experts were used."""
        if self._updates and self._path is not None:
            self._file = self._file or MetricsFile(self._path, resume_after_step=self._after)
            self._file.log(step, {role: experts_line(updates) for role, updates in self._updates.items()})
        self.begin_step()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
