"""The meaning of a folder that a user names: a run, its checkpoints, one of them, a role in it, or a model.

Every command that takes such a folder asks here, so that all of them take the same ones.
"""

from __future__ import annotations

from pathlib import Path

from megarl.runs.run_checkpoint import CheckpointFolder


def checkpoint_in(folder: str | Path) -> Path | None:
    """The checkpoint that `folder` is, that it is a role of, or the newest of a run or its `checkpoints`; None: none."""
    path = Path(folder)
    for candidate in (path, path.parent):
        if (candidate / "state.json").is_file():
            return candidate
    for candidate in (path, path / "checkpoints"):
        if newest := CheckpointFolder(candidate).all()[-1:]:
            return newest[0]
    return None


def weights_in(folder: str | Path, *, exported_first: bool = False) -> Path:
    """The folder of weights that `folder` is or holds; `folder` itself where nothing is found.

    Of a checkpoint or a run these are the policy's; with `exported_first`, of a run those in `model/`, if they were exported.
    """
    path = Path(folder)
    if (path / "config.json").is_file() or (path / ".metadata").is_file():
        return path
    exported = path / "model"
    if exported_first and (exported / "config.json").is_file():
        return exported
    checkpoint = checkpoint_in(path)
    if checkpoint is not None:
        return checkpoint / "policy"
    return exported if (exported / "config.json").is_file() else path


def run_of(folder: str | Path) -> Path:
    """The run that `folder` is, or that it is a checkpoint of; `folder` itself where nothing is found."""
    path = Path(folder)
    around = (path, *path.absolute().parents[:3])
    return next((candidate for candidate in around if (candidate / "metrics.jsonl").is_file()), path)
