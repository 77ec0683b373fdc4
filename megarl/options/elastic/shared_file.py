"""A rank's part of a role in its node's shared memory: a file that is written over in place, step after step. Linux.

Values go straight from the model into the file, whose pages stay in memory and mapped: to make them anew costs several times
what the copy does, and the owner of the folder has what was written even if the rank's process is gone a moment later.
"""

from __future__ import annotations

import io
import mmap
import os
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import Tensor

from megarl import platform
from megarl.checkpoint.dist_writer import Written
from megarl.checkpoint.format.dist_format import COMMON, StoredChunk, StoredKey
from megarl.checkpoint.format.torch_save_format import frame
from megarl.runs.manifest import FileRecord

if TYPE_CHECKING:
    from megarl.megatron.shards import Shards

_GROWTH = 2**14
"""Bytes by whose multiples a file grows, so that objects of a few bytes more leave it as it is."""


@dataclass(frozen=True)
class KeptPart:
    """The files of a rank in its node's memory, without checksums; how much was copied, and the processor's seconds for it."""

    written: Written
    copied_bytes: int
    cpu_s: float


class SharedFile:
    """The file of one rank and role in one slot; it may have become another one since it was last written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._framed: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def write(self, shards: Shards) -> KeptPart:
        """Have the file be these shards; on return they may change.

        Raises:
            MemoryError: shared memory has no room.
        """
        began = time.thread_time()
        kinds = [(box.data.dtype, box.sizes) for box in shards.boxes]
        frames = [frame(*kind) for kind in kinds]
        *starts, end = accumulate((around.length for around in frames), initial=0)
        self._open(end + sum(map(len, shards.objects.values())))
        if kinds != self._framed:
            for around, start in zip(frames, starts, strict=True):
                self._put(around.prefix, start)
                self._put(around.suffix, start + around.length - len(around.suffix))
            self._framed = kinds
        firsts = [start + len(around.prefix) for around, start in zip(frames, starts, strict=True)]
        places = [self._bytes[first : first + box.data.nbytes] for first, box in zip(firsts, shards.boxes, strict=True)]
        _copy([box.data.view(torch.uint8) for box in shards.boxes], places)
        written = Written(absent=dict(shards.absent), keys=self._keys(shards, frames, starts))
        for name, content in shards.objects.items():
            self._put(content, end)
            written.objects[name] = self._path.name, end, len(content)
            end += len(content)
        written.files[self._path.name] = FileRecord(end, "")
        if shards.common is not None:
            pickled = io.BytesIO()
            torch.save(shards.common, pickled)
            (self._path.parent / COMMON).write_bytes(pickled.getvalue())
            written.files[COMMON] = FileRecord(pickled.tell(), "")
        copied = sum(record.bytes for record in written.files.values())
        return KeptPart(written, copied, time.thread_time() - began)

    def _keys(self, shards: Shards, frames: list[Any], starts: list[int]) -> dict[str, StoredKey]:
        chunks: dict[str, list[StoredChunk]] = {}
        kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for box, around, start in zip(shards.boxes, frames, starts, strict=True):
            chunk = StoredChunk(box.offsets, box.sizes, self._path.name, start, around.length)
            chunks.setdefault(box.key, []).append(chunk)
            kinds[box.key] = box.data.dtype, box.global_shape
        return {key: StoredKey(*kinds[key], tuple(of_key)) for key, of_key in chunks.items()}

    def _put(self, content: bytes, start: int) -> None:
        self._bytes[start : start + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def _open(self, nbytes: int) -> None:
        """Map the file, with room for so many bytes, unless it is mapped."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            inode = os.fstat(descriptor).st_ino
            if inode == self._inode and nbytes <= len(self._bytes):
                return
            size = -(-nbytes // _GROWTH) * _GROWTH
            os.posix_fallocate(descriptor, 0, size)  # to write to a page that cannot be had would end the process
            self._bytes, self._inode, self._framed = _mapped(descriptor, size), inode, []
        except OSError as error:
            raise MemoryError(f"'{self._path}' has no room for {nbytes} bytes ({error.strerror})") from None
        finally:
            os.close(descriptor)


def _mapped(descriptor: int, size: int) -> Tensor:
    """The file's bytes; a GPU, where there is one, can write them by itself."""
    mapped = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    if platform.cuda_present():
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(mapped.data_ptr(), size, 0))
        finalize(mapped, runtime.cudaHostUnregister, mapped.data_ptr())
    return mapped


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy all; from a GPU on a stream of its own, behind what computes them."""
    if not platform.cuda_present():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
    stream.synchronize()
