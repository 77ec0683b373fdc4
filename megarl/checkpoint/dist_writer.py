"""A role's checkpoint on disk, written by its ranks at the same time and without waiting for each other.

Each rank writes a file of its own and says what is in it; whoever has heard of all of them writes the table of contents,
without which there is no checkpoint. The format is megatron-core's `torch_dist`, which `dist_checkpointing.load` reads.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.checkpoint.direct_file import DirectFile
from megarl.checkpoint.format.dist_format import COMMON, StoredChunk, StoredKey, write_metadata
from megarl.checkpoint.format.torch_save_format import frame
from megarl.errors import CheckpointError
from megarl.runs.manifest import FileRecord

if TYPE_CHECKING:
    from megarl.megatron.shards import Shards


@dataclass
class Written:
    """The files that a rank wrote: its files, where in them the chunks of tensors and the objects are, and what
    `Shards.absent` says."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    keys: dict[str, StoredKey] = field(default_factory=dict)
    objects: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)


def write_shards(shards: Shards, folder: str | Path) -> Written:
    """Write a rank's part of a role's checkpoint into `folder`; on return it is on the disk.

    Raises:
        CheckpointError: it could not be written; names the file and why.
        MemoryError: this process had no memory left for it, which is not the disk's fault, nor anybody's mistake.
    """
    written, path = Written(absent=dict(shards.absent)), Path(folder) / f"__{shards.rank}_0.distcp"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with DirectFile(path) as output:
            chunks: dict[str, list[StoredChunk]] = {}
            kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
            for box in shards.boxes:
                around, start = frame(box.data.dtype, box.sizes), output.position
                output.write(around.prefix)
                for values in (box.data, *box.rest):
                    output.write(values.view(torch.uint8).numpy())
                output.write(around.suffix)
                chunks.setdefault(box.key, []).append(StoredChunk(box.offsets, box.sizes, path.name, start, around.length))
                kinds[box.key] = (box.data.dtype, box.global_shape)
            for name, content in shards.objects.items():
                written.objects[name] = (path.name, output.position, len(content))
                output.write(content)
            written.files[path.name] = FileRecord(output.position, output.finish())
        written.keys = {key: StoredKey(*kinds[key], tuple(of_key)) for key, of_key in chunks.items()}
        if shards.common is not None:
            path = Path(folder) / COMMON
            pickled = io.BytesIO()
            torch.save(shards.common, pickled)
            with DirectFile(path) as output:
                output.write(pickled.getvalue())
                written.files[path.name] = FileRecord(output.position, output.finish())
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"'{path}' could not be written ({error.strerror})") from None
        raise CheckpointError(f"'{path}' could not be written ({error.strerror})") from None
    return written


def join_roles(parts: Mapping[str, Sequence[Written]], folder: Path) -> dict[str, FileRecord]:
    """Make a checkpoint of what all ranks wrote of each role below `folder`; returns the files by their path there.

    Raises:
        CheckpointError: the parts of a role do not make whole tensors.
    """
    joined = ((role, join_shards(folder / role, of_ranks)) for role, of_ranks in parts.items())
    return {f"{role}/{name}": record for role, files in joined for name, record in files.items()}


def join_shards(folder: str | Path, parts: Sequence[Written]) -> dict[str, FileRecord]:
    """Make a checkpoint of what all ranks wrote into `folder`; returns the ranks' files.

    Raises:
        CheckpointError: the parts do not make whole tensors.
    """
    keys: dict[str, StoredKey] = {}
    for part in parts:
        for key, stored in part.keys.items():
            before = keys.get(key)
            if before is not None and (before.dtype, before.shape) != (stored.dtype, stored.shape):
                raise CheckpointError(f"the ranks do not agree on '{key}': {before.shape} and {stored.shape}")
            keys[key] = StoredKey(stored.dtype, stored.shape, (*(before.chunks if before else ()), *stored.chunks))
    for key, stored in keys.items():
        elements = sum(prod(chunk.sizes) for chunk in stored.chunks)
        expected = prod(stored.shape) - sum(part.absent.get(key, 0) for part in parts)
        if elements != expected or len({chunk.offsets for chunk in stored.chunks}) != len(stored.chunks):
            raise CheckpointError(f"the ranks wrote {elements} elements of '{key}', of which there are {expected}")
    write_metadata(Path(folder), keys, {name: at for part in parts for name, at in part.objects.items()})
    return {name: record for part in parts for name, record in part.files.items()}
