"""A node's memory for checkpoints: the files of its ranks and of its buddy's, in shared memory. Linux.

The folder outlives ranks and is gone with the run. Each node copies the files of one other node's ranks, so that the loss of a
node, or of several that are no buddies, loses nothing. Files are written over in place, and of what a node copied before,
pieces that are still the same are not copied again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import xxhash

from megarl.checkpoint.dist_writer import Written, join_shards
from megarl.checkpoint.format.dist_format import COMMON
from megarl.errors import CheckpointError
from megarl.system.own_temporary import remove_with_this_process
from megarl.system.process_exit import end_with_parent
from megarl.system.threads import step_back

SHARED_MEMORY = "/dev/shm"
PIECE_BYTES = 2**24
"""Bytes that one message between nodes has."""


@dataclass
class FilePieces:
    """A file's bytes, and the XXH3-128 of each `PIECE_BYTES` of them; None of a piece that is not known."""

    nbytes: int
    digests: list[bytes | None] = field(default_factory=list)


@dataclass(frozen=True)
class Sent:
    """Bytes that the buddy was sent of a node's files, and seconds of processors of both for it; whether the buddy has all."""

    bytes: int = 0
    cpu_s: float = 0.0
    is_there: bool = True


class NodeMemory:
    """Owner of the folder `name` in shared memory, in a process that computes nothing. Its methods wait without a thread."""

    def __init__(self, name: str) -> None:
        end_with_parent()
        self.folder = Path(SHARED_MEMORY, name)
        self.folder.mkdir(mode=0o700)
        remove_with_this_process([self.folder])
        self._known: dict[str, dict[str, FilePieces]] = {}
        """By slot and file the pieces that this node has copied from another one, or has sent."""
        self._copied: dict[str, set[str]] = {}
        """By slot the files of another node that have been copied whole since the slot was begun."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=step_back)

    async def begin(self, slot: str, own: Collection[str], others: Collection[str]) -> None:
        """Have a slot be written: files that are neither `own` ones of this node's ranks nor the buddy's go."""
        for path in [*(self.folder / slot).rglob("*")]:
            if path.is_file() and str(path.relative_to(self.folder / slot)) not in {*own, *others}:
                path.unlink()
        known, self._copied[slot] = self._known.get(slot, {}), set()
        self._known[slot] = {name: pieces for name, pieces in known.items() if name in others and name not in own}

    async def complete(self, slot: str, files: Mapping[str, int], buddy: Any) -> Sent:
        """Have the `buddy` copy the files that ranks of this node wrote, by their paths in the slot with their bytes."""
        loop, me = asyncio.get_running_loop(), ray.get_runtime_context().current_actor
        sums, seconds = await loop.run_in_executor(self._thread, self._sums, slot, files)
        self._known[slot] |= sums
        try:
            sent, of_buddy_s = await buddy.copy.remote(slot, me, sums)
        except ray.exceptions.RayActorError:  # it is lost, and these files are here
            return Sent(cpu_s=seconds, is_there=False)
        return Sent(sent, seconds + of_buddy_s)

    def _sums(self, slot: str, files: Mapping[str, int]) -> tuple[dict[str, FilePieces], float]:
        began, sums = time.thread_time(), {}
        for name, size in files.items():
            content = _mapped(self.folder / slot / name, 0, size)
            pieces = (content[start : start + PIECE_BYTES].data for start in range(0, size, PIECE_BYTES))
            sums[name] = FilePieces(size, [xxhash.xxh3_128_digest(piece) for piece in pieces])
        return sums, time.thread_time() - began

    async def copy(self, slot: str, owner: Any, files: Mapping[str, FilePieces]) -> tuple[int, float]:
        """Copy files from another node, by their paths in a slot: what this one does not have of them already.

        Returns the bytes that came, and the processor's seconds for them.

        Raises:
            CheckpointError: what came is not what was written.
        """
        loop, came, seconds = asyncio.get_running_loop(), 0, 0.0
        for name, wanted in files.items():
            known = self._known.setdefault(slot, {}).setdefault(name, FilePieces(0))
            known.nbytes, count = wanted.nbytes, len(wanted.digests)
            known.digests = [*known.digests[:count], *[None] * (count - len(known.digests))]
            for number, digest in enumerate(wanted.digests):
                if known.digests[number] == digest:
                    continue
                known.digests[number] = None
                start = number * PIECE_BYTES
                piece = await owner.read.remote(f"{slot}/{name}", start, min(PIECE_BYTES, wanted.nbytes - start))
                seconds += await loop.run_in_executor(self._thread, _put, self.folder / slot / name, start, piece, digest)
                known.digests[number] = digest
                came += len(piece)
            self._copied[slot].add(name)
        return came, seconds

    async def has(self, slot: str, files: Collection[str]) -> bool:
        """Return whether all of these files of another node have been copied here since the slot was begun."""
        return {*files} <= self._copied.get(slot, set())

    async def read(self, path: str, offset: int, length: int) -> np.ndarray[Any, Any]:
        """Bytes of a file, by its path in the folder; Ray takes them from there."""
        return _mapped(self.folder / path, offset, length)

    async def finish(self, slot: str, parts: Mapping[str, Sequence[Written]], firsts: Mapping[str, Any]) -> None:
        """Write the tables of contents of a checkpoint, by role of what all ranks wrote; `firsts`: by role a node that has the
        first rank's files, with what all ranks share."""
        for role, written in parts.items():
            folder = self.folder / slot / role
            folder.mkdir(parents=True, exist_ok=True)
            join_shards(folder, written)
            if not (folder / COMMON).exists():
                content = await firsts[role].read.remote(f"{slot}/{role}/{COMMON}", 0, written[0].files[COMMON].bytes)
                (folder / COMMON).write_bytes(content)

    async def free_bytes(self) -> int:
        """Bytes that fit in besides what is there."""
        return shutil.disk_usage(SHARED_MEMORY).free


def _mapped(path: Path, offset: int, length: int) -> np.ndarray[Any, Any]:
    """Bytes of a file where they lie."""
    return np.asarray(np.memmap(path, np.uint8, "r", offset, (length,)))


def _put(path: Path, start: int, piece: Any, digest: bytes | None) -> float:
    """Write a piece into its place; returns the processor's seconds."""
    began = time.thread_time()
    if xxhash.xxh3_128_digest(piece) != digest:
        raise CheckpointError(f"'{path.name}' of the checkpoint in memory is damaged on its way to another node")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, piece, start)
    finally:
        os.close(descriptor)
    return time.thread_time() - began


# Ray's decorator gives classes methods that their types do not show.
NodeMemoryActor: Any = ray.remote(num_cpus=0, max_concurrency=64)(NodeMemory)
