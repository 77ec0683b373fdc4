"""A run's checkpoints on disk: `step_000012/` with one folder per role and `state.json`, complete or not there.

A checkpoint is written under a hidden name, sealed by its manifest and renamed, so what carries a step's name was whole once;
whether it still is, its manifest tells.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.checkpoint.manifest import check, seal, sync_folder
from megarl.errors import CheckpointError

_NAME = re.compile(r"step_(\d{6,})")


class CheckpointFolder:
    """The `checkpoints/` folder of a run. `keep` newest checkpoints stay on disk; 0 keeps all."""

    def __init__(self, folder: str | Path, keep: int = 0) -> None:
        self.folder, self.keep = Path(folder), keep
        self.damaged: list[str] = []

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to fill; it becomes `step_N` if the block succeeds and vanishes if it raises."""
        final, temporary = self.folder / f"step_{step:06d}", self.temporary(step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            seal(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        sync_folder(self.folder)
        if self.keep:
            for old in self.all()[: -self.keep]:
                shutil.rmtree(old)

    def temporary(self, step: int) -> Path:
        """Where the checkpoint of `step` is until it is whole."""
        return self.folder / f".writing_step_{step:06d}"

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(m[1]), p) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found)]

    def resolve(self, resume: str) -> Path | None:
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
        if not (path / "state.json").is_file():
            raise CheckpointError(
                f"run.resume is '{resume}', but there is no checkpoint in that folder (state.json is missing); "
                "it may be 'never', 'auto' or a folder such as runs/<name>/checkpoints/step_000010"
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
    (folder / "state.json").write_text(json.dumps(state, indent=1))


def read_state(folder: Path) -> dict[str, Any]:
    """Read back what `write_state` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return json.loads((folder / "state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder / 'state.json'} cannot be read ({error}); resume from another checkpoint") from None
