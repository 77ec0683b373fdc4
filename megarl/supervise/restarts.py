"""A run that outlives its processes: what fails through no fault of the user is taken down and begun again from the newest
valid checkpoint, a bounded number of times, each failure in the run folder's `faults.jsonl`.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megarl.config import AnyConfig
from megarl.errors import RunStopped, WorkerError
from megarl.observe.kept_lines import cut_torn_end
from megarl.runs.owner import Claim, leave_run, take_run
from megarl.runs.run_checkpoint import CheckpointFolder
from megarl.supervise.child_run import report_end
from megarl.supervise.watched_run import INPUTS, ExitStatus, Signals, start_child_run
from megarl.system.atomic_files import write_text_atomically

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 300.0
ENVIRONMENT = ("WorkerError", "DeadlineError")
"""Errors that are nobody's mistake."""
ONCE_IT_RAN = ("EngineError", "RewardServerError", "ClusterError", "MirrorError")
"""Errors that are the user's mistake unless the same run has worked before."""


@dataclass
class Fault:
    """A line of `faults.jsonl`. `recovered_s`: from when it was noticed until a step was done again; null: not (yet)."""

    time: str
    attempt: int
    phase: str
    who: str
    what: str
    steps_done: int
    """By the attempt that failed."""
    wait_s: float | None
    """Seconds before the next attempt; null if there is none."""
    recovered_s: float | None = None


def run_with_restarts(config: AnyConfig, train: Callable[[AnyConfig], Any]) -> int:
    """Call `train(config)` in a process of its own; if that fails, again from the newest checkpoint, `run.max_restarts` times.

    Returns the exit code. In that process it returns, or raises, what `train` does; so the caller goes on in both, and must not
    have imported what starts threads.

    Raises:
        OwnerError: a run that is alive owns the folder, or took it over.
        WorkerError: it failed once more than it may be restarted, and could not say so itself.
        RunStopped: a signal ended it between two attempts.
    """
    if not config.run.max_restarts:
        train(config)
        return 0
    claim = take_run(config)
    try:
        return _Supervision(config, train, claim).run()
    finally:
        leave_run(claim)


class _Supervision:
    def __init__(self, config: Any, train: Callable[[Any], Any], claim: Claim) -> None:
        self.config, self.train, self.claim = config, train, claim
        self.folder = Path(config.run_folder)
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints")
        self.faults: list[Fault] = []
        self.signals = Signals()
        self._there_before = self._written()
        self.has_begun = self.has_run = False
        self._failed_at: float | None = None
        self._earlier = ""

    def run(self) -> int:
        config, failed_in_a_row = self.config, 0
        with self.signals:
            while True:
                stacks = self.folder / "logs" / "stacks" / "driver.txt"
                attempt = start_child_run(stacks, self.signals, self._recovered, self.claim.beat, len(self.faults))
                if attempt is None:
                    return self._as_attempt(config)
                outcome = attempt.watch()
                self.signals.pass_on_to(None)
                if outcome.code == 0:
                    self._recovered()
                self.has_begun |= outcome.phase != INPUTS
                self.has_run |= bool(outcome.steps)
                if outcome.failure is None or not self._is_worth_another(outcome.failure["kinds"]):
                    if outcome.code < 0:  # it did not come to say itself why it ended
                        raise WorkerError(_killed(outcome))
                    return outcome.code
                failed_in_a_row = 1 if outcome.steps else failed_in_a_row + 1
                wait_s = min(FIRST_WAIT_S * 2 ** (failed_in_a_row - 1), LONGEST_WAIT_S)
                self._note(outcome, wait_s)
                self._wait(wait_s)
                config = self._continued()

    def _as_attempt(self, config: Any) -> int:
        try:
            self.train(config)
        except BaseException as error:
            report_end(error)
            raise
        return 0

    def _is_worth_another(self, kinds: Sequence[str]) -> bool:
        """`kinds`: the classes of the error; none where the attempt was killed or stuck."""
        if "MegarlError" not in kinds:
            return True
        return any(kind in kinds for kind in (*ENVIRONMENT, *(ONCE_IT_RAN if self.has_run else ())))

    def _note(self, outcome: ExitStatus, wait_s: float) -> None:
        """Write the failure down and say what follows.

        Raises:
            WorkerError: no more restarts are left.
            RunStopped, KeyboardInterrupt: the run had been told to stop.
        """
        assert outcome.failure is not None
        who, what = outcome.failure["who"], outcome.failure["what"]
        again = len(self.faults) < self.config.run.max_restarts and not self.signals.received
        if not self.faults and (self.folder / "faults.jsonl").exists():
            cut_torn_end(self.folder / "faults.jsonl")  # else the next line would stand behind half of one
            self._earlier = (self.folder / "faults.jsonl").read_text(errors="replace")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.faults.append(Fault(now, len(self.faults) + 1, outcome.phase, who, what, outcome.steps, wait_s if again else None))
        self._failed_at = outcome.failed_at
        self._write()
        where = f"in phase '{outcome.phase}', {who}: {what}"
        self._leave_if_told(f"it failed {where}")
        if not again:
            raise WorkerError(
                f"the run failed for the {_ordinal(len(self.faults))} time {where}; run.max_restarts is "
                f"{self.config.run.max_restarts}, so it is not started again; {self._how_to_go_on()}"
            )
        newest = self.checkpoints.all()
        origin = f"continues from {newest[-1]}" if newest else "begins anew (there is no checkpoint yet)"
        restart = f"restart {len(self.faults)} of {self.config.run.max_restarts} in {wait_s:.0f} s"
        sys.stderr.write(f"megarl: failed {where}; {restart} {origin}\n")
        sys.stderr.flush()

    def _wait(self, wait_s: float) -> None:
        ends_at = time.monotonic() + wait_s
        while (left_s := ends_at - time.monotonic()) > 0:
            self._leave_if_told("it was to be begun again")
            self.claim.beat()
            time.sleep(min(left_s, 0.2))

    def _leave_if_told(self, meanwhile: str) -> None:
        if "SIGINT" in self.signals.received:
            raise KeyboardInterrupt
        if self.signals.received:
            raise RunStopped(f"stopped by {self.signals.received[0]}; {meanwhile}; {self._how_to_go_on()}")

    def _continued(self) -> Any:
        """The config of the next attempt: from this run's newest checkpoint; a named one counts until there is a newer one."""
        if not self.has_begun:  # it may yet be refused, for what another run left in its folder
            return self.config
        resume = self.config.run.resume
        if resume in ("never", "auto") or self._written() - self._there_before:
            resume = "auto"
        return self.config.model_copy(update={"run": self.config.run.model_copy(update={"resume": resume})})

    def _written(self) -> set[tuple[Path, int]]:
        """The checkpoints of this run, each with a time that tells it from another of its name; no clock orders them."""
        return {(path, path.stat().st_mtime_ns) for path in self.checkpoints.all()}

    def _recovered(self) -> None:
        """A step is done again after a failure, or the run."""
        if self._failed_at is not None:
            self.faults[-1].recovered_s = round(time.monotonic() - self._failed_at, 3)
            self._failed_at = None
            self._write()

    def _write(self) -> None:
        self.claim.look()
        lines = "".join(json.dumps(asdict(fault)) + "\n" for fault in self.faults)
        write_text_atomically(self.folder / "faults.jsonl", self._earlier + lines)

    def _how_to_go_on(self) -> str:
        return f"run.resume=auto continues from the newest checkpoint in {self.checkpoints.folder}, if there is one"


def _killed(outcome: ExitStatus) -> str:
    """Say why a run ended that was killed on its way out."""
    why = outcome.failure["what"] if outcome.failure is not None else "the run was told to leave"
    return f"{why}; its processes did not end by themselves after that, and were killed by {signal.Signals(-outcome.code).name}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
