"""Files and folders that appear whole or not at all: written beside their place, then renamed into it."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_text_atomically(path: str | Path, text: str, *, is_private: bool = False) -> None:
    """`write_bytes_atomically` of `text` in UTF-8."""
    write_bytes_atomically(path, text.encode(), is_private=is_private)


def write_bytes_atomically(path: str | Path, content: bytes, *, is_private: bool = False) -> None:
    """Write `content` to `path`, making its folder; a reader sees the old file or the new one, never half of one.

    Threads and processes may write the same path at once: one of them is the last. A file that `is_private` is its owner's
    alone from the start, whatever the umask.
    """
    with whole_file(path, is_private=is_private) as file:
        file.write(content)


@contextmanager
def whole_file(path: str | Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` if the block succeeds and vanishes if it raises; as `write_bytes_atomically`."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(part, "wb", opener=for_owner if is_private else None) as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def for_owner(path: str, flags: int) -> int:
    """Open a file as `open(…, opener=for_owner)` does: a new one can be read by its owner alone, whatever the umask."""
    return os.open(path, flags, 0o600)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` (new, or an empty folder) if the block succeeds and vanishes if it raises.

    It gets the mode that the user's umask gives to new folders; temporary ones are private.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield part
        probe = part / ".mode"
        probe.touch()
        mode = probe.stat().st_mode & 0o777
        probe.unlink()
        part.chmod(mode | (mode & 0o444) >> 2)
        part.replace(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
