"""The manifest of a whole checkpoint: `manifest.json` with the size and checksum of every other file, durable before it
is named.

It also says what wrote the checkpoint. A folder without a manifest, or with a file that differs from it, is damaged; the
sentence says which file and how.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megarl.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK = 2**22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksum of a file as it was meant to be."""

    bytes: int
    xxh3_128: str


def seal(folder: Path, made: Mapping[str, Any], written: Mapping[str, FileRecord] | None = None) -> None:
    """Write the manifest of everything in `folder`; on return all of it is on the disk, not only in its cache.

    `made` is where the checkpoint comes from, JSON-able. `written` are files that are durable already, by their names from
    `folder`, with what was meant to be in them; the others are read.

    Raises:
        CheckpointError: a file of `written` is missing or has another size.
    """
    files = dict(written or {})
    for name, record in files.items():
        _check_size(folder / name, record.bytes)
    names = [name for name in _files(folder) if name not in files]
    with ThreadPoolExecutor(max_workers=8) as pool:
        checksums = list(pool.map(lambda name: _checksum(folder / name, sync=True), names))
    for name, checksum in zip(names, checksums, strict=True):
        files[name] = FileRecord((folder / name).stat().st_size, checksum)
    content = {"format": FORMAT, "made": dict(made), "files": {name: asdict(files[name]) for name in sorted(files)}}
    with (folder / MANIFEST).open("w") as out:
        out.write(render(content))
        out.flush()
        os.fsync(out.fileno())
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_folder(inner)


def made_by(folder: Path) -> dict[str, Any]:
    """The origin of the checkpoint, as `seal` was told it; empty before megarl kept it.

    Raises:
        CheckpointError: the manifest is missing or not what was written.
    """
    return dict(_read(folder).get("made", {}))


def check(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: the manifest, or a file of it, is missing or not what was written.
    """
    files = _read(folder)["files"]
    for name, record in files.items():
        _check_size(folder / name, record["bytes"])
    if added := sorted(set(_files(folder)) - files.keys()):
        raise CheckpointError(f"'{folder / added[0]}' is not in the checkpoint's {MANIFEST}")
    with ThreadPoolExecutor(max_workers=8) as pool:
        checksums = pool.map(lambda name: _checksum(folder / name), files)
        for (name, record), checksum in zip(files.items(), checksums, strict=True):
            if checksum != record["xxh3_128"]:
                raise CheckpointError(f"'{folder / name}' is damaged: its checksum is not that of what was written")


def parse(text: str, name: str) -> dict[str, Any]:
    """Read `text` that `render` made, without the checksum; `name` is what a sentence calls the file.

    Raises:
        CheckpointError: it is not what was written, or of another format.
    """
    try:
        content = json.loads(text)
        del content["xxh3_128"]
        if text != render(content):
            raise CheckpointError(f"'{name}' is damaged: its checksum is not its own")
        if content["format"] != FORMAT:
            raise CheckpointError(f"'{name}' has format {content['format']!r}, but this megarl reads format {FORMAT}")
        return content
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"'{name}' is damaged: it cannot be read ({error!r})") from None


def files_of(content: Mapping[str, Any]) -> dict[str, FileRecord]:
    """The files of a manifest, as `parse` gives it, by their names from its folder."""
    return {name: FileRecord(**record) for name, record in content["files"].items()}


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def render(content: Mapping[str, Any]) -> str:
    """A manifest's own text, with a checksum of itself, so that a change of any byte of it shows."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    return json.dumps({**content, "xxh3_128": checksum}, indent=1) + "\n"


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        return parse(path.read_text(), str(path))
    except FileNotFoundError:
        raise CheckpointError(f"'{folder}' is no complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path}' is damaged: it cannot be read ({error!r})") from None


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise CheckpointError(f"'{path}' is missing, but the checkpoint's {MANIFEST} names it")
    if path.stat().st_size != size:
        raise CheckpointError(f"'{path}' has {path.stat().st_size} bytes, but {size} were written")


def _files(folder: Path) -> list[str]:
    """Every file below `folder` but the manifest, by its name from there, in order."""
    paths: Iterable[Path] = (path for path in folder.rglob("*") if path.is_file())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def _checksum(path: Path, *, sync: bool = False) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()
