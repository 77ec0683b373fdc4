"""A run's checkpoints on disk: `step_000012/` with one folder per role and `state.json`, complete or not there.

A checkpoint is written under a hidden name, sealed by its manifest and renamed, so what carries a step's name was whole once;
whether it still is, its manifest tells. Names and their order come from steps alone, never from a clock.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.checkpoint.manifest import FileRecord, check, made_by, seal, sync_folder
from megarl.errors import CheckpointError

_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED = ".writing_step_"
_LOWER_IS_BETTER = ("loss",)


class CheckpointFolder:
    """The `checkpoints/` folder of a run.

    `keep` newest checkpoints stay on disk (0: all), and besides them the one whose `best` is the highest, or lowest if it
    is a loss; `best` names a figure of the evaluations that `commit` is told of.
    """

    def __init__(self, folder: str | Path, keep: int = 0, best: str | None = None) -> None:
        self.folder, self.keep, self.best = Path(folder), keep, best
        self.damaged: list[str] = []

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
        temporary, final = self.temporary(step), self.folder / f"step_{step:06d}"
        seal(temporary, {**(made or {}), "evaluation": dict(evaluation or {})}, written)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        sync_folder(self.folder)
        if self.keep:
            best = self.best_checkpoint()
            for old in self.all()[: -self.keep]:
                if old != best:
                    shutil.rmtree(old)
        return final

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that came to nothing."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Remove what runs that died were writing; no other run may be writing here."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def best_checkpoint(self) -> Path | None:
        """The newest of those with the best value of `best`, as their manifests tell; None if none has it."""
        if self.best is None:
            return None
        sign = -1 if self.best.rpartition("/")[2] in _LOWER_IS_BETTER else 1
        values = {}
        for path in self.all():
            with suppress(CheckpointError):  # of a damaged one nothing is known
                value = made_by(path).get("evaluation", {}).get(self.best)
                if value is not None:
                    values[path] = sign * value
        return max(values, key=lambda path: (values[path], path.name)) if values else None

    def temporary(self, step: int) -> Path:
        """Where the checkpoint of `step` is until it is whole."""
        return self.folder / f"{_UNFINISHED}{step:06d}"

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(m[1]), p) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found)]

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
                f"{field} is '{resume}', but there is no checkpoint in that folder (state.json is missing); "
                f"it must be {words}a folder such as runs/<name>/checkpoints/step_000010"
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
