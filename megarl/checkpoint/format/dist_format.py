"""megarl's view of a megatron-core distributed checkpoint (`torch_dist`): read and written without torch.distributed.

A folder holds `__R_N.distcp` files of saved tensors and objects one after another, `.metadata` that says which chunk of which
key lies where, `common.pt` for what is not sharded, and `metadata.json` that names the format.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint.format.torch_save_format import find_tensor
from megarl.errors import CheckpointError

_DAMAGED = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, ValueError, TypeError, OSError)
METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
_FORMAT_JSON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a key's tensor, `sizes` from `offsets` on, whose frame is `length` bytes from `offset` of a file on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key's whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class DistFolder:
    """A distributed checkpoint opened for reading."""

    def __init__(self, path: str | Path) -> None:
        """Read the metadata.

        Raises:
            CheckpointError: it is no such checkpoint, its metadata is damaged or names files that are missing or short, or
                reading it could run code.
        """
        from megarl.checkpoint.format.safe_pickle import read_metadata  # a second to import, which a dry run does not need

        self.path = Path(path)
        if not is_dist_checkpoint(self.path):
            raise CheckpointError(
                f"'{path}' is no megatron-core distributed checkpoint: it has no {METADATA}; it must be the folder of one "
                "role, such as checkpoints/step_000010/policy"
            )
        metadata = read_metadata(self.path / METADATA)
        try:
            described = metadata.state_dict_metadata
            stored = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
            self.keys = {key: _stored_key(key, value, stored) for key, value in described.items() if hasattr(value, "chunks")}
        except _DAMAGED as error:
            raise CheckpointError(f"'{self.path / METADATA}' cannot be read ({error!r}); the checkpoint is damaged") from None
        self.objects = [key for key in described if key not in self.keys]
        self._check_files()

    def data_offset(self, key: str, chunk: StoredChunk) -> int:
        """The byte of its file at which a chunk's values begin.

        Raises:
            CheckpointError: there is no such chunk as the metadata says.
        """
        try:
            with (self.path / chunk.file).open("rb") as file:
                return find_tensor(file, chunk.offset, chunk.length, self.keys[key].dtype, chunk.sizes)
        except CheckpointError as error:
            raise CheckpointError(f"'{self.path / chunk.file}' is damaged: where '{key}' should be, there is {error}") from None

    def _check_files(self) -> None:
        ends: dict[str, tuple[int, str]] = {}
        for key, stored in self.keys.items():
            for chunk in stored.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, (0, "")), (chunk.offset + chunk.length, key))
        for file, (end, key) in ends.items():
            path = self.path / file
            if not path.is_file():
                raise CheckpointError(f"'{self.path}' lacks '{file}', which holds '{key}'")
            if path.stat().st_size < end:
                raise CheckpointError(f"'{path}' is cut short: '{key}' ends at byte {end}, the file at {path.stat().st_size}")


def is_dist_checkpoint(path: Path) -> bool:
    """Return whether the folder has a distributed checkpoint's metadata."""
    return (path / METADATA).is_file()


def write_metadata(folder: Path, keys: Mapping[str, StoredKey], objects: Mapping[str, tuple[str, int, int]]) -> None:
    """Write `.metadata` and `metadata.json`; each of `objects` is at (file, offset, length). `common.pt` is the caller's."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, stored in keys.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in stored.chunks]
        described[key] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)
        for chunk in stored.chunks:
            storage[MetadataIndex(key, torch.Size(chunk.offsets))] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
    for name, (file, offset, length) in objects.items():
        described[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = _StorageInfo(file, offset, length)
    metadata = Metadata(described, storage_data=storage, storage_meta=StorageMeta(), version="1.0.0")
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    (folder / FORMAT).write_text(json.dumps(_FORMAT_JSON))


def empty_object() -> bytes:
    """The bytes that megatron-core stores for an object that is None."""
    content = io.BytesIO()
    torch.save([None], content)
    return content.getvalue()


def _stored_key(key: str, value: Any, stored: Mapping[tuple[str, Any], Any]) -> StoredKey:
    chunks = []
    for chunk in value.chunks:
        info = stored[key, chunk.offsets]
        chunks.append(StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length))
    return StoredKey(value.properties.dtype, tuple(value.size), tuple(chunks))
