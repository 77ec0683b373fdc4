"""One attempt at a run, in a process that its parent watches, outlives and cleans up after. Linux.

The parent forks before anything heavy is imported. The attempt reports through a pipe (`child_run.py`). If the parent is
killed the kernel kills the attempt, Ray and the engines go with it, and `reaper.py` sees to the rest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

import psutil

from megarl.errors import OwnerError
from megarl.supervise.child_run import report_to
from megarl.supervise.reaper import start_reaper
from megarl.system.own_temporary import OwnTemporary
from megarl.system.process_exit import adopt_orphans, end_with_parent, heeded
from megarl.system.process_tree import descendants, end_tree
from megarl.system.redaction import redacted
from megarl.system.threads import share_heaps

SILENT_S = 60.0
"""An attempt that gave no sign of life for so long is stopped or stuck outside Python, and is ended."""
TEARDOWN_S = 90.0
"""For an attempt that failed to take down its world; then it is ended."""
SLICE_S = 0.2
RAY_LOGS = ("raylet", "gcs_server", "monitor")
RAY_LOG_BYTES = 2**16
INPUTS = "inputs"
"""Name of an attempt's work before its first phase: it reads the user's files, and nothing but Ray is begun or written."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass
class ExitStatus:
    """The end of an attempt: its exit code (minus the signal's number if one ended it) and what it had reported."""

    code: int = 0
    steps: int = 0
    """Steps that it did."""
    phase: str = INPUTS
    """The phase that it was in last."""
    failure: dict[str, Any] | None = None
    """`kind`, `who` and `what` of the error that ended it, or of what was noticed from outside."""
    was_told: bool = False
    """Left because it was told to."""
    failed_at: float = 0.0
    """When that was noticed, in `time.monotonic()`."""


class Signals:
    """While entered, notes SIGINT, SIGTERM, SIGUSR1 and SIGHUP in `received` and passes them on to a process, if any."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self._to: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._pass_on) for number in heeded(FORWARDED)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def pass_on_to(self, pid: int | None) -> None:
        """From now on to this process, which also gets what came while it was started; None: to nobody."""
        self._to = pid
        if pid is not None:
            for name in self.received:
                os.kill(pid, signal.Signals[name])

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)
        if self._to is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._to, number)


@dataclass
class ChildRun:
    """The parent's side."""

    pid: int
    pipe: int
    stacks: IO[bytes]
    """Where the attempt writes its Python stacks when it gets SIGUSR2."""
    stack_file: Path
    """Where they go if they were asked for: until then a run has no files."""
    on_step: Callable[[], None]
    """Called once, when the attempt has done its first step."""
    meanwhile: Callable[[], None]
    """Called several times a second, to show that this process owns the run's folder."""
    temporary: OwnTemporary
    """Where temporary files of the attempt and of all that it starts are."""
    outcome: ExitStatus = field(default_factory=ExitStatus)
    _unread: bytes = b""
    _lost: OwnerError | None = None

    def watch(self) -> ExitStatus:
        """Wait until the attempt has ended; nothing that it started is left then.

        Raises:
            OwnerError: `meanwhile` did, and the attempt, which did not notice itself, was ended at once.
        """
        silent_s = teardown_s = 0.0
        code: int | None = None
        while code is None:
            before = time.monotonic()
            heard = self._read()
            self._keep()
            # time in which this process was stopped itself is nobody's silence
            spent = min(time.monotonic() - before, 2 * SLICE_S)
            silent_s = 0.0 if heard else silent_s + spent
            if self.outcome.failure is not None:
                teardown_s += spent
            if silent_s > SILENT_S and self.outcome.failure is None:
                self._say_stuck()
            if silent_s > SILENT_S or teardown_s > TEARDOWN_S:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            code = self._reap()
        while self._read():
            pass
        os.close(self.pipe)
        self.stacks.close()
        if self.outcome.failure is None and code and not self.outcome.was_told:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._fail({"kinds": [], "who": "driver", "what": f"it {how}"})
        self.outcome.code = code
        end_descendants()
        self._keep_ray_logs()
        self.temporary.remove()
        if self._lost is not None:
            raise self._lost
        return self.outcome

    def _keep_ray_logs(self) -> None:
        """Keep the ends of what Ray's own processes said of a failure, as their files are among the temporary ones."""
        kinds = self.outcome.failure["kinds"] if self.outcome.failure is not None else ["MegarlError"]
        if self._lost is not None or ("MegarlError" in kinds and "WorkerError" not in kinds):
            return
        kept = self.stack_file.parent.parent / "ray"
        with contextlib.suppress(OSError):  # a disk that is full is told of elsewhere
            for log in self.temporary.ray.glob("session_*/logs/*"):
                if log.stem in RAY_LOGS and not log.parent.parent.is_symlink() and log.is_file():
                    kept.mkdir(parents=True, exist_ok=True)
                    (kept / log.name).write_text(redacted(log.read_bytes()[-RAY_LOG_BYTES:].decode(errors="replace")))

    def _keep(self) -> None:
        """Show that the folder is owned; where it no longer is, end the attempt before it writes further."""
        if self._lost is None and self.outcome.failure is None:
            try:
                self.meanwhile()
            except OwnerError as error:
                self._lost = error
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> int | None:
        """The attempt's exit code if it has ended; orphans of its are seen off too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self.pid:
                    return os.waitstatus_to_exitcode(status)
                if pid == 0:
                    return None
        return None

    def _read(self) -> bool:
        """Take in what the attempt says within a moment; False if that is nothing."""
        if not select.select([self.pipe], [], [], SLICE_S)[0]:
            return False
        data = os.read(self.pipe, 65536)
        if not data:
            time.sleep(SLICE_S)
            return False
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._heard(json.loads(line))
        return True

    def _heard(self, said: dict[str, Any]) -> None:
        if said.get("steps"):
            if not self.outcome.steps:
                self.on_step()
            self.outcome.steps = said["steps"]
        self.outcome.phase = said.get("phase") or self.outcome.phase
        self.outcome.was_told |= said.get("was_told", False)
        if "failure" in said:
            self._fail(said["failure"])

    def _fail(self, failure: dict[str, Any]) -> None:
        self.outcome.failure, self.outcome.failed_at = failure, time.monotonic()

    def _say_stuck(self) -> None:
        """Note that the attempt gives no sign of life, and have it write its Python stacks if it still can."""
        state = "it gave no heartbeat"
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                state = "it was stopped (SIGSTOP)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
        time.sleep(1.0)
        self.stacks.seek(0)
        stacks = self.stacks.read()
        if stacks:
            self.stack_file.parent.mkdir(parents=True, exist_ok=True)
            self.stack_file.write_bytes(stacks)
        where = f"its Python stacks are in {self.stack_file}" if stacks else "it gave no Python stacks"
        self._fail({"kinds": [], "who": "driver", "what": f"{state} for {SILENT_S:.0f} s; {where}"})


def start_child_run(
    stack_file: Path, signals: Signals, on_step: Callable[[], None], meanwhile: Callable[[], None], restarts: int = 0
) -> ChildRun | None:
    """Fork: the parent gets the attempt; the attempt itself gets None and goes on as if it had no parent.

    `restarts`: attempts that failed before this one. The others are those of `ChildRun`.
    """
    adopt_orphans()
    read, write = os.pipe()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the attempt runs
    sys.stdout.flush()
    sys.stderr.flush()
    temporary = OwnTemporary(is_seen_to=True)
    pid = os.fork()
    if pid:
        start_reaper(pid, temporary.folders)
        signals.pass_on_to(pid)
        os.close(write)
        return ChildRun(pid, read, stacks, stack_file, on_step, meanwhile, temporary)
    signals.__exit__()
    os.setsid()  # a terminal's Ctrl-C comes once, through the parent
    end_with_parent()
    os.close(read)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    share_heaps()
    temporary.use()
    report_to(write, restarts)
    return None


def end_descendants(tries: int = 20) -> Sequence[psutil.Process]:
    """End whatever still lives below this process, all of it started by its attempts; returns what could not be ended."""
    for _ in range(tries):
        if not descendants(os.getpid()):
            return []
        end_tree(os.getpid(), spare_root=True)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    return descendants(os.getpid())
