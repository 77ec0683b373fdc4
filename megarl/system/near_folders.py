"""The folder that a user may have meant by a name that leads nowhere."""

from __future__ import annotations

from pathlib import Path

from megarl.errors import nearest


def nearest_folder(path: str | Path) -> str:
    """Return ` (did you mean 'runs/own'?)` for the folder beside `path` whose name is closest; empty where `path` is there."""
    wanted = Path(path)
    if wanted.is_dir() or not wanted.parent.is_dir():
        return ""
    return nearest(str(wanted), [str(beside) for beside in wanted.parent.iterdir() if beside.is_dir()])
