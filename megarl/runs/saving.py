"""A run's checkpoints in the making: begun between two steps, written while training goes on, and whole at some later time.

A checkpoint has its name only once every rank's part is on the disk and the manifest is sealed; until then it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.runs.provenance import CONFIG
from megarl.runs.run_checkpoint import CheckpointFolder, write_state
from megarl.runs.training_side import POLICY, TrainingSide
from megarl.system.atomic_files import write_text_atomically


@dataclass(frozen=True)
class _Pending:
    step: int
    made: Mapping[str, Any]
    evaluation: Mapping[str, float] | None


class Saving:
    """At most one checkpoint is under way. Every process that drives the ranks makes the same calls; the leader writes."""

    def __init__(self, checkpoints: CheckpointFolder, config_text: str, *, leads: bool) -> None:
        self.checkpoints, self.config_text, self.leads = checkpoints, config_text, leads
        self.then: Callable[[Path], None] | None = None
        """Function that the leader calls with each checkpoint that has its name."""
        self._pending: _Pending | None = None

    @property
    def is_under_way(self) -> bool:
        """Return whether a checkpoint was begun and has not got its name."""
        return self._pending is not None

    def begin(
        self,
        roles: TrainingSide,
        step: int,
        state: Mapping[str, Any],
        made: Mapping[str, Any],
        evaluation: Mapping[str, float] | None = None,
    ) -> None:
        """Take down `state` and the roles as they are; on return training may go on. `finish` does the rest.

        `made` and `evaluation` are as in `CheckpointFolder.commit`.

        Raises:
            CheckpointError: the folder cannot be written to.
        """
        assert self._pending is None, "the one before is finished first"
        folder = self.checkpoints.temporary(step)

        def open_folder() -> None:
            self.checkpoints.begin(step)
            write_state(folder, dict(state))
            write_text_atomically(folder / CONFIG, self.config_text, is_private=True)

        with self._named(step):
            self._have_led(roles, open_folder)
        roles.save(str(folder.resolve()))
        self._pending = _Pending(step, made, evaluation)

    def finish(self, roles: TrainingSide, *, wait: bool) -> bool:
        """Give the checkpoint under way its name, once all of it is on the disk; whether none is under way any more.

        `wait`: however long that takes.

        Raises:
            CheckpointError: a part could not be written; names the file. What was written is removed.
        """
        if self._pending is None:
            return True
        pending, folder = self._pending, self.checkpoints.temporary(self._pending.step)
        with self._named(pending.step):
            join = roles.saved(wait=wait)
            if join is None:
                return False

            def commit() -> None:
                named.append(self.checkpoints.commit(pending.step, pending.made, join(folder), pending.evaluation))

            named: list[Path] = []
            self._have_led(roles, commit)
        self._pending = None
        if self.then is not None and named:
            self.then(named[0])
        return True

    def give_up(self) -> None:
        """Leave the checkpoint under way, of which ranks may have lost their parts, for the next one."""
        if self._pending is not None:
            self.checkpoints.abandon(self._pending.step)
            self._pending = None

    def _have_led(self, roles: TrainingSide, work: Callable[[], None]) -> None:
        """The leader does `work`, and every other driver waits for it and shares its failure."""
        failure: CheckpointError | OSError | None = None
        if self.leads:
            try:
                work()
            except (CheckpointError, OSError) as error:
                failure = error
        if roles.groups[POLICY].any_rank(failure is not None):
            raise failure or CheckpointError("the leading rank could not write its part")

    @contextmanager
    def _named(self, step: int) -> Iterator[None]:
        """Name this checkpoint in what goes wrong inside, which is said of this checkpoint, and nothing of it stays."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            self._pending = None
            if self.leads:
                self.checkpoints.abandon(step)
            at = self.checkpoints.temporary(step)
            why = f"'{error.filename or at}': {error.strerror}" if isinstance(error, OSError) else str(error)
            newest = ([None, *self.checkpoints.all()])[-1]
            resume_hint = (
                f"run.resume=auto continues from {newest}"
                if newest is not None
                else "there is no earlier checkpoint to resume from"
            )
            raise CheckpointError(f"the checkpoint of step {step} was not saved: {why}; {resume_hint}") from None


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written into the folder of a run, which is made if need be; None if it can."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return error.strerror
    return None
