"""The attempt's side of a run whose parent watches it: phases, steps, signs of life and why it failed go through a pipe.

Without a parent, which `watched_run.py` is, a run tells nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any

from megarl.errors import RunStopped
from megarl.observe.phases import Phases
from megarl.runs.still_owned import check_owned
from megarl.system.redaction import redacted

BEAT_S = 2.0


class StatusPipe:
    """The attempt's end of the pipe. What does not fit, because the parent does not read, is not said."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        os.set_blocking(pipe, False)
        threading.Thread(target=self._beat, name="signs-of-life", daemon=True).start()

    def follow(self, phases: Phases) -> None:
        """Tell of every phase from now on."""
        phases.listen(lambda name: self._tell({"steps": phases.steps, "phase": name}))

    def failed(self, error: BaseException) -> None:
        """Tell why the attempt fails."""
        what = redacted(str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")[:500]
        kinds = [kind.__name__ for kind in type(error).__mro__]
        self._tell({"failure": {"kinds": kinds, "who": getattr(error, "who", "") or "driver", "what": what}})

    def leaves(self) -> None:
        """Tell that the attempt leaves because it was told to."""
        self._tell({"was_told": True})

    def _beat(self) -> None:
        while True:
            self._tell({})
            time.sleep(BEAT_S)

    def _tell(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, json.dumps(what).encode() + b"\n")  # at once: shorter than PIPE_BUF


_report: StatusPipe | None = None
_restarts = 0


def is_restart() -> bool:
    """Return whether this process goes on with what another one, which failed, was doing: started again here or by torchrun."""
    return bool(_restarts or int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0))


def is_watched() -> bool:
    """Return whether this process is somebody's attempt: whatever it starts is seen off if it cannot do that itself."""
    return _report is not None


def follow(phases: Phases) -> None:
    """Look at every phase from now on whether the run still owns its folder; tell the parent, if there is one, of the phase.

    Where another process has taken the folder over, the phase raises OwnerError.
    """
    phases.listen(lambda name: check_owned())
    if _report is not None:
        _report.follow(phases)


def report_to(pipe: int, restarts: int) -> None:
    """Report from now on through `pipe`; `restarts`: attempts that failed before this one."""
    global _report, _restarts
    _report, _restarts = StatusPipe(pipe), restarts


def report_end(error: BaseException) -> None:
    """Tell the parent why this attempt ends before it is done."""
    if _report is None:
        return
    if isinstance(error, (RunStopped, KeyboardInterrupt)):
        _report.leaves()
    else:
        _report.failed(error)
