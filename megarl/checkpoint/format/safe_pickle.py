"""Whether reading a checkpoint could run code: its pickles may name nothing but the plain values that checkpoints are made of.

torch and megatron-core unpickle `.metadata`, `common.pt` and saved objects without asking; a checkpoint is looked at here
before they do.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
import re
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from megarl.errors import CheckpointError

METADATA, COMMON = ".metadata", "common.pt"
_DESCRIPTIONS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner"))
_OF_MEGATRON_CORE = frozenset({"mcore_data", "all_local_plans"})
"""Attributes that megatron-core adds to a Metadata."""
_PLAIN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): Path,
    ("pathlib._local", "PosixPath"): Path,
}
# numpy's part of the random numbers' state is an array; its kinds of numbers are classes of their own
_ARRAYS: list[Any] = [
    np.ndarray.__reduce__(np.zeros(0))[0],
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in "?bBhHiIqQefd"),
]


def check_pickles(folder: str | Path) -> None:
    """Look at every pickle of the distributed checkpoints in and below `folder`, running nothing.

    Raises:
        CheckpointError: a pickle names something else than plain values, or is none; the sentence says which file and what.
    """
    for path in sorted(Path(folder).rglob(METADATA)):
        metadata = read_metadata(path)
        if (common := path.parent / COMMON).is_file():
            _load_plain(common, common.read_bytes())
        for index, info in metadata.storage_data.items():
            if type(metadata.state_dict_metadata.get(index.fqn)) is not TensorStorageMetadata:
                _check_object(path.parent, index.fqn, info)


def read_metadata(path: Path) -> Any:
    """The content of a `.metadata`, as torch's FileSystemReader reads it, but for what it may be made of.

    Every key is described as a tensor or as an object, by torch's own class and no other.

    Raises:
        CheckpointError: it is no such file, names other things, or leads out of its folder.
    """
    try:
        with path.open("rb") as file:
            reader = _Descriptions(file)
            metadata = reader.load()
        if max(reader.memo, default=0) > path.stat().st_size:  # by which torch's own reader would take memory
            raise ValueError("it numbers more values than it has")
        for key, described in metadata.state_dict_metadata.items():
            if type(described) not in (TensorStorageMetadata, BytesStorageMetadata):
                raise TypeError(f"it describes '{key}' as a {type(described).__name__}")
        for index, info in metadata.storage_data.items():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"'{path}' leads out of its folder, to '{info.relative_path}'")
            if not info.relative_path.isprintable():
                raise ValueError(f"{info.relative_path!r} is no name of a file")
            if not isinstance(index.fqn, str) or min(info.offset, info.length) < 0:
                raise ValueError(f"{index} is at {info}")
            if info.transform_descriptors:  # torch would unpack it first, into something else than what is looked at here
                raise ValueError(f"'{index.fqn}' is stored transformed, by {info.transform_descriptors}")
    except _Refused as error:
        raise CheckpointError(_would_run(path, str(error))) from None
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything, such as MemoryError
        raise CheckpointError(f"'{path}' is damaged: it cannot be read ({error!r:.300})") from None
    return metadata


class _Refused(pickle.UnpicklingError):
    pass


class _Descriptions(pickle._Unpickler):
    """Unpickles descriptions of tensors; the classes it knows do nothing but hold values.

    Python's own unpickler, as the one in C takes as much memory as a number in the file says: 34 GB for a file of 1 kB.
    """

    memo: dict[int, Any]
    stack: list[Any]

    def load_build(self) -> None:
        """Set the fields of a description, and no other attribute: those of a class belong to the whole process."""
        described, state = self.stack[-2:]
        kind = type(described)
        if not dataclasses.is_dataclass(kind):
            raise _Refused(f"sets attributes of {described!r:.100}")
        if not hasattr(kind, "__setstate__"):
            fields = {field.name for field in dataclasses.fields(kind)}
            added = _OF_MEGATRON_CORE if kind is Metadata else frozenset()
            if not isinstance(state, dict) or not state.keys() <= fields | added:
                raise _Refused(f"sets more than the fields of {kind.__name__}")
        super().load_build()  # type: ignore[misc]  # typeshed lists no operations

    def load_bytearray8(self) -> None:
        """Refuse it: as much memory is cleared as it says it is long, and no description has one."""
        raise ValueError("it holds an array of bytes")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if module in _DESCRIPTIONS or module.startswith("megatron.core.dist_checkpointing."):
            candidate = getattr(importlib.import_module(module), name, None)
            if isinstance(candidate, type) and (dataclasses.is_dataclass(candidate) or issubclass(candidate, Enum)):
                return candidate
        raise _Refused(f"names {module}.{name}")


def _check_object(folder: Path, key: str, info: Any) -> None:
    path = folder / info.relative_path
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            content = file.read(min(info.length, path.stat().st_size))
    except OSError as error:
        raise CheckpointError(f"'{path}', which holds '{key}', cannot be read: {error.strerror}") from None
    _load_plain(path, content)


def _load_plain(path: Path, content: bytes) -> None:
    try:
        with torch.serialization.safe_globals(_ARRAYS):
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"(?:GLOBAL|class|function) ([\w.]+)", str(error))
        raise CheckpointError(_would_run(path, f"names {named[1] if named else 'something else than plain values'}")) from None
    except Exception as error:  # noqa: BLE001 - as above
        what = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"'{path}' is damaged: it cannot be read ({type(error).__name__}: {what[:200]})") from None


def _would_run(path: Path, what: str) -> str:
    return f"'{path}' is not read, as that could run code of whoever made it: it {what}"
