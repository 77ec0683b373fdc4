"""Weights for engines far away, in files: the newest version whole, and its differences from the version before, compressed.

A difference is the exclusive or of a tensor's bits with those of the version before. Bytes of equal significance lie behind
each other before zstd sees them: what an optimizer step leaves alone, exponents above all, is then long runs of zeros. Every
tensor has the checksum of its bits, so that who has put one together knows that it is what was sent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from megarl.errors import ConfigError, EngineError
from megarl.system.atomic_files import whole_folder
from megarl.weights.checksums import digest
from megarl.weights.staging import dtype_name

LEVEL = 3
INDEX, FULL, DIFFERENCE = "index", "full", "difference"
PARTS = (INDEX, FULL, DIFFERENCE)
"""Files of a version's folder."""
Bytes = npt.NDArray[np.uint8]


def zstandard() -> Any:
    """The package zstandard.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import zstandard as package
    except ImportError:
        raise ConfigError("rollout.sites needs zstandard, which is not installed: pip install 'megarl[sites]'") from None
    return package


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of a version: where its frames lie in the two files, `(start, bytes)`. No frame: it is as it was before."""

    name: str
    dtype: str
    shape: list[int]
    checksum: str
    full: tuple[int, int]
    difference: tuple[int, int] | None

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        size: int = getattr(torch, self.dtype).itemsize
        for extent in self.shape:
            size *= extent
        return size


class VersionIndex(msgspec.Struct, frozen=True):
    """A version of the weights. `base`: the version that its differences are from; None: it has none."""

    version: int
    base: int | None
    tensors: list[TensorEntry]
    nbytes: int
    full_bytes: int
    difference_bytes: int


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bits of a tensor `[nbytes]`, where they lie."""
    flat: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _planes(values: Bytes, itemsize: int) -> bytes:
    return np.ascontiguousarray(values.reshape(-1, itemsize).T).tobytes()


def _joined(planes: bytes, itemsize: int) -> Bytes:
    return np.array(np.frombuffer(planes, np.uint8).reshape(itemsize, -1).T, order="C").reshape(-1)  # a copy, to be written to


def packed(values: Bytes, itemsize: int) -> bytes:
    """A frame of zstd with `values`."""
    frame: bytes = zstandard().ZstdCompressor(level=LEVEL).compress(_planes(values, itemsize))
    return frame


def unpacked(frame: bytes, nbytes: int, itemsize: int) -> Bytes:
    """The `nbytes` bytes in a frame of `packed`.

    Raises:
        EngineError: it is damaged, or has another number of bytes, which are not made then.
    """
    zstd = zstandard()
    try:
        if zstd.frame_content_size(frame) != nbytes:
            raise EngineError("weights that came are damaged: a frame has another size than its tensor")
        return _joined(zstd.ZstdDecompressor().decompress(frame), itemsize)
    except zstd.ZstdError as error:
        raise EngineError(f"weights that came are damaged: {error}") from None


class WeightStore:
    """Versions of the weights under a folder: the newest, and the one before, which who is slow may still be reading."""

    def __init__(self, folder: Path) -> None:
        """Remove what an earlier start of the run has left there: its numbers may stand for other weights."""
        self._folder = folder
        self.newest: VersionIndex | None = None
        shutil.rmtree(folder, ignore_errors=True)

    def path(self, version: int, part: str) -> Path | None:
        """The file of a version; None: it is not there (any more)."""
        path = self._of(version) / part
        return path if part in PARTS and path.is_file() else None

    def _of(self, version: int) -> Path:
        return self._folder / f"version-{version}"

    def add(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> VersionIndex:
        """Write `version`, with differences from the one that is the newest so far. Holds one tensor at a time.

        If `tensors` raises, nothing has changed.
        """
        base = self.newest
        with whole_folder(self._of(version)) as folder:
            entries = []
            with open(folder / FULL, "wb") as full, open(folder / DIFFERENCE, "wb") as difference:
                before = _Before(base, self._of(base.version) if base is not None else None)
                with before:
                    for name, tensor in tensors:
                        entries.append(_write(name, tensor, full, difference, before))
                sizes = full.tell(), difference.tell()
            same = base is not None and _forms(base.tensors) == _forms(entries)
            from_version = base.version if base is not None and same else None
            index = VersionIndex(version, from_version, entries, sum(entry.nbytes for entry in entries), *sizes)
            (folder / INDEX).write_bytes(msgspec.json.encode(index))
        self.newest = index
        kept = {index.version, index.base}
        for old in self._folder.glob("version-*"):
            if int(old.name.partition("-")[2]) not in kept:
                shutil.rmtree(old, ignore_errors=True)
        return index


def _forms(entries: Iterable[TensorEntry]) -> set[tuple[Any, ...]]:
    return {(entry.name, entry.dtype, *entry.shape) for entry in entries}


class _Before:
    """The tensors of the version before, read one by one."""

    def __init__(self, index: VersionIndex | None, folder: Path | None) -> None:
        self._entries = {entry.name: entry for entry in index.tensors} if index is not None else {}
        self._folder, self._file = folder, None  # type: Path | None, IO[bytes] | None

    def __enter__(self) -> _Before:
        self._file = open(self._folder / FULL, "rb") if self._folder is not None else None
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def entry(self, name: str) -> TensorEntry | None:
        return self._entries.get(name)

    def bytes(self, entry: TensorEntry) -> Bytes:
        assert self._file is not None, "there is a version before"
        return _read(self._file, entry.full, entry)


def _read(file: IO[bytes], place: tuple[int, int], entry: TensorEntry) -> Bytes:
    file.seek(place[0])
    return unpacked(file.read(place[1]), entry.nbytes, getattr(torch, entry.dtype).itemsize)


def _write(name: str, tensor: torch.Tensor, full: IO[bytes], difference: IO[bytes], before: _Before) -> TensorEntry:
    values, checksum, itemsize = bytes_of(tensor), digest(tensor), tensor.dtype.itemsize
    dtype, shape = dtype_name(tensor), [*tensor.shape]
    base, start, of_difference = before.entry(name), full.tell(), None
    full.write(packed(values, itemsize))
    if base is not None and (base.dtype, base.shape) == (dtype, shape) and base.checksum != checksum:
        begins = difference.tell()
        difference.write(packed(values ^ before.bytes(base), itemsize))
        of_difference = begins, difference.tell() - begins
    return TensorEntry(name, dtype, shape, checksum, (start, full.tell() - start), of_difference)


@dataclass
class HeldWeights:
    """The weights that an engine far away has, from which differences are taken: bytes by name, and their version."""

    version: int | None
    tensors: dict[str, Bytes]

    def part_for(self, index: VersionIndex) -> str:
        """The file of a version that is to be fetched: the differences, if they are from what is held."""
        return DIFFERENCE if index.base is not None and index.base == self.version else FULL

    def take(self, index: VersionIndex, part: str, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Take over the version in the file `path`, tensor by tensor; each is given on once its checksum is that of the index.

        The version is held when the last one was given; until then it is of no known version.

        Raises:
            EngineError: a frame is damaged, or a tensor is not what was sent.
        """
        self.version = None
        with path.open("rb") as file:
            for entry in index.tensors:
                if part == FULL:
                    self.tensors[entry.name] = _read(file, entry.full, entry)
                elif entry.difference is not None:
                    held = self.tensors.get(entry.name)
                    changed = _read(file, entry.difference, entry)
                    if held is None or held.shape != changed.shape:
                        raise EngineError(f"weights that came have a difference for {entry.name}, which is not held")
                    held ^= changed
                tensor = torch.from_numpy(self.tensors[entry.name]).view(getattr(torch, entry.dtype)).view(entry.shape)
                if (found := digest(tensor)) != entry.checksum:
                    raise EngineError(
                        f"{entry.name} of version {index.version} has checksum {found}, the run's is {entry.checksum}"
                    )
                yield entry.name, tensor
        self.version = index.version


def check_index(index: VersionIndex) -> VersionIndex:
    """The index of a version; raises EngineError if it names a dtype that there is not, or a shape that is none."""
    for entry in index.tensors:
        if not isinstance(getattr(torch, entry.dtype, None), torch.dtype) or min(entry.shape, default=0) < 0:
            raise EngineError("the run sent no index of weights")
    return index


def told_bytes(count: float) -> str:
    """`1.5 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
