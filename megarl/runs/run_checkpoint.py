"""A run's checkpoints on disk: `step_000012/` with one folder per role and `state.json`, complete or not there.

A checkpoint is written under a hidden name, sealed by its manifest and renamed, so what carries a step's name was whole once;
whether it still is, its manifest tells. Names and their order come from steps alone, never from a clock.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.runs.manifest import FileRecord, check, made_by, seal, sync_folder
from megarl.system.near_folders import nearest_folder

_NAME = re.compile(r"step_(\d{6,})")
UNFINISHED = ".writing_step_"
_LOWER_IS_BETTER = ("loss",)


class CheckpointFolder:
    """The `checkpoints/` folder of a run.

    `keep` newest checkpoints stay on disk (0: all), and besides them the one whose `best` is the highest, or lowest if it
    is a loss; `best` names a figure of the evaluations that `commit` is told of.
    """

    def __init__(self, folder: str | Path, keep: int = 0, best: str | None = None) -> None:
        self.folder, self.keep, self.best = Path(folder), keep, best
        self.damaged: list[str] = []
        self.lock = threading.Lock()
        self.held: Path | None = None
        """A checkpoint that another thread reads, and that stays meanwhile; set under `lock`."""

    def begin(self, step: int) -> Path:
        """An empty folder to fill; `commit` makes it the checkpoint of `step`, and `abandon` removes it."""
        folder = self.temporary(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(
        self,
        step: int,
        made: Mapping[str, Any] | None = None,
        written: Mapping[str, FileRecord] | None = None,
        evaluation: Mapping[str, float] | None = None,
    ) -> Path:
        """Seal what was written since `begin`, give it its name and remove what is not kept; returns the checkpoint.

        `made` and `written` are as in `manifest.seal`; `evaluation` has the figures of these very weights, if there are any.
        """
        seal(self.temporary(step), {**(made or {}), "evaluation": dict(evaluation or {})}, written)
        final = self.name_whole(step)
        if self.keep:
            with self.lock:
                best = self.best_checkpoint()
                for old in self.all()[: -self.keep]:
                    if old not in (best, self.held):
                        shutil.rmtree(old)
        return final

    def name_whole(self, step: int) -> Path:
        """Give what was written since `begin`, its manifest included, its name; returns the checkpoint."""
        final = self.folder / f"step_{step:06d}"
        shutil.rmtree(final, ignore_errors=True)
        os.rename(self.temporary(step), final)
        sync_folder(self.folder)
        return final

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that came to nothing."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Remove what runs that died were writing; no other run may be writing here."""
        for path in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def best_checkpoint(self) -> Path | None:
        """The newest of those with the best value of `best`, as their manifests tell; None if none has it."""
        if self.best is None:
            return None
        evaluations = {}
        for path in self.all():
            with suppress(CheckpointError):  # of a damaged one nothing is known
                evaluations[step_of(path.name)] = made_by(path).get("evaluation", {})
        best = best_step(evaluations, self.best)
        return self.folder / f"step_{best:06d}" if best is not None else None

    def temporary(self, step: int) -> Path:
        """The folder of the checkpoint of `step` until it is whole."""
        return self.folder / f"{UNFINISHED}{step:06d}"

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        checkpoints = [(step, path) for path in self.folder.iterdir() if (step := step_of(path.name)) is not None]
        return [path for _, path in sorted(checkpoints)]

    def resolve(self, resume: str, field: str = "run.resume") -> Path | None:
        """The checkpoint that `run.resume` means: `never` none, `auto` the newest sound one if any, else the named folder.

        What `auto` passes over as damaged is in `damaged`, a sentence each.

        Raises:
            CheckpointError: the named folder is not a checkpoint or damaged, or `auto` finds only damaged ones.
        """
        self.damaged = []
        if resume == "never":
            return None
        if resume == "auto":
            return self._newest_sound()
        path = Path(resume)
        words = "'never', 'auto' or " if field == "run.resume" else "a run folder, or "
        if not (path / "state.json").is_file():
            raise CheckpointError(
                f"{field} is '{resume}', but there is no checkpoint in that folder (state.json is missing)"
                f"{nearest_folder(path)}; it must be {words}a folder such as runs/<name>/checkpoints/step_000010"
            )
        check(path)
        return path

    def _newest_sound(self) -> Path | None:
        for path in reversed(self.all()):
            try:
                check(path)
            except CheckpointError as error:
                self.damaged.append(str(error))
            else:
                return path
        if self.damaged:
            raise CheckpointError(
                f"run.resume is 'auto', but every checkpoint in {self.folder} is damaged; the newest: {self.damaged[0]}"
            )
        return None


def step_of(name: str) -> int | None:
    """The step of a checkpoint of this name; None if no complete checkpoint is called so."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def best_step(evaluations: Mapping[int | None, Mapping[str, float]], figure: str) -> int | None:
    """The newest of the steps whose `figure` is best, of those that have it; None if none has."""
    sign = -1 if figure.rpartition("/")[2] in _LOWER_IS_BETTER else 1
    pairs = ((step, had.get(figure)) for step, had in evaluations.items())
    values = {step: sign * value for step, value in pairs if step is not None and value is not None}
    return max(values, key=lambda step: (values[step], step)) if values else None


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the driver's state of a checkpoint."""
    (folder / "state.json").write_text(json.dumps(state))


def read_state(folder: Path) -> dict[str, Any]:
    """Read back what `write_state` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / 'state.json'} cannot be read ({error}); resume from another checkpoint") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder / 'state.json'} is no JSON object; resume from another checkpoint")
    return state
