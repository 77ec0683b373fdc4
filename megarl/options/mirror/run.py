"""`run.mirror` in a run: what it has written goes to a second place while it trains, and comes back where its folder lacks it.

A thread copies one checkpoint after the other; of those that became whole meanwhile it takes the newest. What it cannot copy
is said and counted, and tried again with the next checkpoint: only a run's start insists on the second place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.config import AnyConfig
from megarl.errors import CheckpointError, ConfigError, MirrorError
from megarl.options.mirror.mirror import Mirror, open_store
from megarl.options.mirror.section import mirror_of
from megarl.runs.observers import RunObserver
from megarl.runs.run_checkpoint import CheckpointFolder, step_of
from megarl.system.redaction import redacted
from megarl.system.threads import step_back

MIB = 2**20


class _Stopped(Exception):
    """The run leaves without waiting for what is under way."""


class Mirroring(RunObserver):
    """Copies what one run writes. Only the process that writes it has one."""

    def __init__(self, config: AnyConfig, checkpoints: CheckpointFolder) -> None:
        """Nothing is read or written yet.

        Raises:
            ConfigError: `run.mirror` needs a package that is not installed, or its environment cannot be used.
        """
        where = mirror_of(config.run)
        assert where is not None, "whoever makes one has asked"
        store = open_store(where, config.run.name)
        self.mirror = Mirror(store, checkpoints.keep, checkpoints.best, self._go_on)
        self.where = store.address
        self._config, self._checkpoints = config, checkpoints
        self._folder = Path(config.run_folder)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted: Path | None = None
        self._stopped = threading.Event()
        self._said: list[str] = []
        self._failures = self._step = 0

    def fetch(self, resume: str, *, is_restart: bool) -> Path | None:
        """See that the place can be used, before anything is started; with `auto`, fetch what the run's folder lacks.

        `is_restart`: the run has been under way, and does not end for a place that cannot be used now. Returns the checkpoint
        that `resume` means.

        Raises:
            ConfigError: another run is there already.
            MirrorError: it cannot be read or written.
            CheckpointError: `resume` names no sound checkpoint, or all of them, here and there, are damaged.
        """
        local, trouble = self._local(resume)
        try:
            self.mirror.check_writable()
            if resume == "never" and self.mirror.holds_a_run():
                raise ConfigError(
                    f"run.name is '{self._config.run.name}', but {self.where} already holds copies of a run; give this one "
                    "another run.name or run.mirror, continue it with run.resume=auto, or remove them"
                )
            self._open_index()
            fetched = self._bring_back(local) if resume == "auto" else None
        except MirrorError as error:
            if is_restart and local is not None:
                self._note(f"cannot be used now: {error}")
                return local
            raise MirrorError(f"run.mirror is '{mirror_of(self._config.run)}', but it cannot be used: {error}") from None
        if trouble is not None and fetched is None:
            raise trouble
        return fetched or local

    def saved(self, checkpoint: Path) -> None:
        """Have this checkpoint, which is whole, and the run's records copied; on return training may go on."""
        with self._lock:
            self._wanted = checkpoint
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def figures(self) -> dict[str, float]:
        """Metrics: the newest step whose checkpoint is there, and copies that failed since the run was started or resumed."""
        return {"checkpoint/mirrored_step": float(self._step), "checkpoint/mirror_failures": float(self._failures)}

    def take_lines(self) -> list[str]:
        """Lines to be said since the last call."""
        with self._lock:
            lines, self._said = self._said, []
        return lines

    def wait(self) -> None:
        """Return when everything has been copied, failed, or has not moved on for `resources.deadlines.save_s`; and say so."""
        moved, moved_at = self.mirror.moved_bytes, time.monotonic()
        while (thread := self._thread) is not None:
            thread.join(0.2)
            if self.mirror.moved_bytes != moved:
                moved, moved_at = self.mirror.moved_bytes, time.monotonic()
            elif time.monotonic() - moved_at > self._config.resources.deadlines.save_s:
                self._note(f"has not taken a byte for {self._config.resources.deadlines.save_s:g} s")
                self.stop()
                return
        if self._step:
            self._said.append(f"mirror: {self.where} has the checkpoint of step {self._step}")

    def end(self, *, wait: bool) -> None:
        """Copy what is left first if `wait`; whatever happens then, nothing more is copied."""
        try:
            if wait:
                self.wait()
        finally:  # Ctrl-C: leave
            self.stop()

    def stop(self) -> None:
        """Have nothing more copied; what is half there does not count."""
        self._stopped.set()

    def _local(self, resume: str) -> tuple[Path | None, CheckpointError | None]:
        """The meaning of `resume` in the run's folder, or why `auto` means nothing there although there are checkpoints."""
        try:
            return self._checkpoints.resolve(resume), None
        except CheckpointError as error:
            if resume != "auto":
                raise
            return None, error

    def _open_index(self) -> None:
        try:
            self.mirror.open_index()
        except CheckpointError as error:
            self._said.append(f"records in the mirror were passed over: {error}")

    def _bring_back(self, local: Path | None) -> Path | None:
        newer_than = step_of(local.name) if local is not None else None
        began = time.monotonic()
        fetched, damaged = self.mirror.bring_back(self._checkpoints, -1 if newer_than is None else newer_than)
        self._said += [f"a checkpoint in the mirror was passed over: {damage}" for damage in damaged]
        if fetched is None:
            return None
        damaged = self.mirror.bring_back_earlier(self._checkpoints, step_of(fetched.name) or 0)
        self._said += [f"a checkpoint in the mirror was passed over: {damage}" for damage in damaged]
        # an exported model is not there; without its summary the run makes both again
        lacking = ("summary.json",) if self._config.run.export else ()
        damaged = self.mirror.bring_back_records(self._folder, but=lacking)
        self._said += [f"a record in the mirror was passed over: {damage}" for damage in damaged]
        self._said.append(
            f"{fetched} was fetched from the mirror {self.where}, with the records that were missing "
            f"({self.mirror.moved_bytes / MIB:.1f} MiB in {time.monotonic() - began:.1f} s)"
        )
        return fetched

    def _work(self) -> None:
        step_back()
        while True:
            with self._lock:
                checkpoint, self._wanted = self._wanted, None
                if checkpoint is None or self._stopped.is_set():
                    self._thread = None
                    return
            try:
                self._copy(checkpoint)
            except _Stopped:
                continue
            except Exception as error:  # noqa: BLE001 - whatever it is, it does not end the run
                self._note(f"does not have {checkpoint.name}: {error}; it is tried again with the next checkpoint")

    def _copy(self, newest: Path) -> None:
        """The records first: a checkpoint that is there without the lines of its steps would not be resumed whole."""
        with self._holding(lambda: newest):
            self.mirror.send_records(self._folder)
            self.mirror.send(newest)
        self._step = step_of(newest.name) or 0
        self.mirror.remove_old(self._step)
        if self._wanted is None:  # else a newer one is more urgent
            with self._holding(self._checkpoints.best_checkpoint) as best:
                if best is not None:
                    self.mirror.send(best)

    @contextmanager
    def _holding(self, choose: Callable[[], Path | None]) -> Iterator[Path | None]:
        """Keep the choice of `choose` in the run's folder meanwhile."""
        with self._checkpoints.lock:
            self._checkpoints.held = chosen = choose()
        try:
            yield chosen
        finally:
            with self._checkpoints.lock:
                self._checkpoints.held = None

    def _note(self, trouble: str) -> None:
        with self._lock:
            self._failures += 1
            self._said.append(redacted(f"mirror: {self.where} {trouble}"))

    def _go_on(self) -> None:
        if self._stopped.is_set():
            raise _Stopped


def observe(config: AnyConfig, checkpoints: CheckpointFolder) -> Mirroring | None:
    """The mirror that `run.mirror` asks for."""
    return Mirroring(config, checkpoints) if mirror_of(config.run) is not None else None
