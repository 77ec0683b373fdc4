"""Places that keep a run's second copies: files by name, each there whole or not at all.

Here are what every place must be able to do, and a folder, such as one on another file system; `s3_store.py` is a bucket.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import xxhash

from megarl.errors import MirrorError
from megarl.runs.manifest import FileRecord, sync_folder

BLOCK = 2**22
"""Bytes that are read or written at once."""
HIDDEN_PREFIX = ".writing_"


class CopyStore(Protocol):
    """A place for files. Names are relative, with `/` between folders. What fails is a `MirrorError`."""

    address: str
    """Name of the place in a sentence."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file below `folder`, by its whole name."""

    def blocks(self, name: str) -> Iterator[bytes]:
        """What is in a file, piece by piece."""

    def put(self, name: str, blocks: Iterable[bytes], record: FileRecord) -> None:
        """Write a file, which `record` describes, in place of what was there; if `blocks` raises, that stays."""

    def holds(self, name: str, record: FileRecord) -> bool:
        """Return whether the file that is there is the one that `record` describes; False if the place cannot tell."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, in this order; what is not there is no error."""

    def unfinished(self, folder: str) -> str:
        """Under which name `folder` is filled until `complete` is called; the same name where a file that is put last tells."""

    def complete(self, folder: str) -> None:
        """Make what was filled under `unfinished(folder)` be `folder`, in place of what was there."""


def is_own_file(path: Path) -> bool:
    """Return whether it is a file, and no link, which might lead to one of somebody else."""
    return path.is_file() and not path.is_symlink()


class FolderStore:
    """A `CopyStore`: a folder, made when something is put into it. What was put is on its disk, not only in a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, str(folder)

    def sizes(self, folder: str) -> dict[str, int]:
        with self._told(folder):
            root = self.folder / folder
            files = (path for path in root.rglob("*") if is_own_file(path)) if root.is_dir() else ()
            return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in files}

    def blocks(self, name: str) -> Iterator[bytes]:
        with self._told(name), (self.folder / name).open("rb") as file:
            while block := file.read(BLOCK):
                yield block

    def put(self, name: str, blocks: Iterable[bytes], record: FileRecord) -> None:
        path = self.folder / name
        part = path.with_name(f"{HIDDEN_PREFIX}{path.name}")
        with self._told(name):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                part.unlink(missing_ok=True)
                with part.open("xb") as out:
                    for block in blocks:
                        out.write(block)
                    out.flush()
                    os.fsync(out.fileno())
                part.replace(path)
                sync_folder(path.parent)
            except BaseException:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
                raise

    def holds(self, name: str, record: FileRecord) -> bool:
        # the file is read
        digest = xxhash.xxh3_128()
        for block in self.blocks(name):
            digest.update(block)
        return digest.hexdigest() == record.xxh3_128

    def remove(self, names: Sequence[str]) -> None:
        # folders that are empty then go too
        for name in names:
            path = self.folder / name
            with self._told(name):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # as soon as one is not empty
                for folder in path.relative_to(self.folder).parents[:-1]:
                    (self.folder / folder).rmdir()

    def unfinished(self, folder: str) -> str:
        """A hidden name beside it."""
        above, _, name = folder.rpartition("/")
        return f"{above}/{HIDDEN_PREFIX}{name}"

    def complete(self, folder: str) -> None:
        filled, final = self.folder / self.unfinished(folder), self.folder / folder
        with self._told(folder):
            for inner in (*(path for path in filled.rglob("*") if path.is_dir()), filled):
                sync_folder(inner)
            shutil.rmtree(final, ignore_errors=True)
            filled.rename(final)
            sync_folder(final.parent)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MirrorError(f"'{error.filename or self.folder / name}': {error.strerror or error}") from error
