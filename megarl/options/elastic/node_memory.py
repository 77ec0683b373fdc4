"""A node's memory for checkpoints: the files of its ranks and of its buddy's, in shared memory. Linux.

The folder outlives ranks and is gone with the run. Each node copies the files of one other node's ranks, so that the loss of a
node, or of several that are no buddies, loses nothing.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import xxhash

from megarl.checkpoint.dist_writer import Written, join_shards
from megarl.checkpoint.format.dist_format import COMMON
from megarl.errors import CheckpointError
from megarl.system.own_temporary import remove_with_this_process
from megarl.system.process_exit import end_with_parent

SHARED_MEMORY = "/dev/shm"
PIECE_BYTES = 2**24
"""Bytes that one message between nodes has."""
RolePart = tuple[str, int]
"""A role, and a rank that writes its part of it."""


class NodeMemory:
    """Owner of the folder `name` in shared memory, in a process that computes nothing. Its methods wait without a thread."""

    def __init__(self, name: str) -> None:
        end_with_parent()
        self.folder = Path(SHARED_MEMORY, name)
        self.folder.mkdir(mode=0o700)
        remove_with_this_process([self.folder])
        self._written: dict[str, dict[RolePart, Written]] = {}
        self._changed = asyncio.Condition()

    async def begin(self, slot: str) -> None:
        """Make room for a checkpoint: what is in its slot goes."""
        await asyncio.to_thread(shutil.rmtree, self.folder / slot, ignore_errors=True)
        self._written[slot] = {}

    async def written(self, slot: str, part: RolePart, written: Written) -> None:
        """A rank of this node has written its part of a role."""
        async with self._changed:
            self._written[slot][part] = written
            self._changed.notify_all()

    async def complete(self, slot: str, parts: Sequence[RolePart], buddy: Any | None) -> dict[RolePart, Written]:
        """Files that ranks of this node wrote, once all of these `parts` are there and the `buddy` has them, too."""
        async with self._changed:
            await self._changed.wait_for(lambda: {*parts} <= self._written[slot].keys())
        own = {part: self._written[slot][part] for part in parts}
        if buddy is not None:
            me = ray.get_runtime_context().current_actor
            files = {
                f"{role}/{name}": (record.bytes, record.xxh3_128)
                for (role, _), written in own.items()
                for name, record in written.files.items()
            }
            await buddy.copy.remote(slot, me, files)
        return own

    async def copy(self, slot: str, owner: Any, files: Mapping[str, tuple[int, str]]) -> None:
        """Copy files, by their paths in a slot with their sizes and checksums, from another node.

        Raises:
            CheckpointError: what came is not what was written.
        """
        for name, (size, checksum) in files.items():
            path, digest = self.folder / slot / name, xxhash.xxh3_128()
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                for start in range(0, size, PIECE_BYTES):
                    piece = await owner.read.remote(f"{slot}/{name}", start, min(PIECE_BYTES, size - start))
                    digest.update(piece)
                    file.write(piece)
            if digest.hexdigest() != checksum:
                raise CheckpointError(f"'{name}' of the checkpoint in memory is damaged on its way to another node")

    async def read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a file, by its path in the folder."""
        with open(self.folder / path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    async def finish(self, slot: str, parts: Mapping[str, Sequence[Written]], firsts: Mapping[str, Any]) -> None:
        """Write the tables of contents of a checkpoint, by role of what all ranks wrote; `firsts`: by role a node that has the
        first rank's files, with what all ranks share."""
        for role, written in parts.items():
            (self.folder / slot / role).mkdir(parents=True, exist_ok=True)
            join_shards(self.folder / slot / role, written)
            if not (self.folder / slot / role / COMMON).exists():
                record = written[0].files[COMMON]
                await self.copy(slot, firsts[role], {f"{role}/{COMMON}": (record.bytes, record.xxh3_128)})

    async def free_bytes(self) -> int:
        """Bytes that fit in besides what is there."""
        return shutil.disk_usage(SHARED_MEMORY).free


# Ray's decorator gives classes methods that their types do not show.
NodeMemoryActor: Any = ray.remote(num_cpus=0, max_concurrency=64)(NodeMemory)
