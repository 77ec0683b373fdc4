"""Observers of a run beside its steps, such as a second place of its files or a tracker: the events of a run, as methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import AnyConfig
from megarl.observe.run_state import RunState
from megarl.option_list import functions
from megarl.runs.run_checkpoint import CheckpointFolder
from megarl.runs.training_side import TrainingSide


@dataclass(frozen=True)
class RunStart:
    """Facts known when a run starts. `resume_after_step`: None for a new run. `say` shows a line of progress."""

    state: RunState
    resume_after_step: int | None
    is_continued: bool
    say: Callable[[str], None]


class RunObserver:
    """The events of a run in the process that writes its files; each does nothing unless an observer says so."""

    def fetch(self, resume: str, *, is_restart: bool) -> Path | None:
        """Before anything is read: bring back what the run's folder lacks; returns the checkpoint that `resume` means."""
        return None

    def started(self, start: RunStart) -> None:
        """The run begins or goes on; nothing runs yet. MegarlErrors end it."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step are written; step 0 is the evaluation before training."""

    def traced(self, step: int, spans: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """A row of `trace.jsonl` is written: `[name, begin, end]` in seconds since the epoch by process."""

    def recorded(self, step: int, roles: TrainingSide) -> Mapping[str, float]:
        """A step is done, and what its ranks did is recorded: they may be asked. Metrics of the step, which guards see."""
        return {}

    def saved(self, checkpoint: Path) -> None:
        """This checkpoint is whole, or the records beside the newest one changed."""

    def figures(self) -> dict[str, float]:
        """Metrics of the observer's own for the next step."""
        return {}

    def take_lines(self) -> list[str]:
        """Lines to be said since the last call."""
        return []

    def last_lines(self) -> list[str]:
        """Lines to be said when all steps are done."""
        return []

    def close(self) -> None:
        """The run leaves, well or badly: write out what is buffered."""

    def end(self, *, wait: bool) -> None:
        """The run's processes are gone; `wait` for what is under way, or leave at once."""


def open_observers(config: AnyConfig, checkpoints: CheckpointFolder) -> list[RunObserver]:
    """The observers of the options that the config asks for.

    Raises:
        ConfigError: one cannot be made, as when its package is not installed.
    """
    observers = (observe(config, checkpoints) for observe in functions("run", "observe"))
    return [observer for observer in observers if observer is not None]
