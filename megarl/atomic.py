"""Files that appear whole or not at all: written beside their place, then renamed into it."""

from __future__ import annotations

import os
from pathlib import Path


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write `text` to `path`, making its folder; a reader sees the old file or the new one, never half of one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
