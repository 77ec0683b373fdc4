"""Records that a run writes of itself: `machine.json`, what it is computed on and by, and `end.json`, why it ended early.

A run that finished has no `end.json`, and neither has one that was killed. Only the leading process writes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.errors import OwnerError, RunInterrupted, RunStopped
from megarl.observe import machine, versions
from megarl.runs.provenance import commit
from megarl.system.atomic_files import write_text_atomically
from megarl.system.redaction import redacted


class RunMarks:
    """Writes both files into `folder`; nothing before `begin`, as the folder may be another run's."""

    def __init__(self, folder: Path, *, leads: bool) -> None:
        self._machine, self._end, self._leads = folder / "machine.json", folder / "end.json", leads
        self._facts: dict[str, Any] = {}

    def begin(self) -> None:
        """The folder is this run's: say on what machine it runs, and forget how an earlier attempt ended."""
        self._end.unlink(missing_ok=True)
        self.note(machine=machine(), versions=versions(), commit=commit())

    def note(self, **facts: Any) -> None:
        """Add `facts` to `machine.json`: `gpus`, how many, and `gpu`, what they are called (None: there are none)."""
        if self._leads:
            self._facts |= facts
            write_text_atomically(self._machine, json.dumps(self._facts, indent=1) + "\n")

    def end(self, error: BaseException | None) -> None:
        """Say how the run ended, where it did so by `error`; not in a folder that another run has taken over."""
        if error is None or isinstance(error, OwnerError) or not self._facts:
            return
        told_to = isinstance(error, RunStopped | RunInterrupted) or not isinstance(error, Exception)
        why = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else redacted(str(error)) or type(error).__name__
        end = {"state": "interrupted" if told_to else "failed", "why": why}
        with suppress(OSError):  # a full disk is told of by the error
            write_text_atomically(self._end, json.dumps(end, indent=1) + "\n")
