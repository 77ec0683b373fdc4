"""The bytes that torch.distributed.checkpoint stores for a chunk of a tensor: the bytes of `torch.save`, around the
tensor's own bytes.

`torch.save` wants the whole tensor in memory and takes a checksum on the way. Here the frame around the data is made from
dtype and shape alone, so data may be streamed into it; and the data inside a frame, whoever wrote it, is found without
reading it. A frame is an uncompressed zip archive with three records: the pickled tensor, its data and the format's version.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, BinaryIO

import torch

from megarl.errors import CheckpointError

_DATA_ALIGNMENT = 64
_ARCHIVE = "archive/"
_DATA_RECORD = "data/0"
_ZIP64_FROM = 0xFFFFFFFF
_ZIP64_EXTRA_ID, _PADDING_EXTRA_ID = 0x0001, 0x4246  # the second is what torch pads with
_TORCH_VERSION_OF_FORMAT = b"3\n"
_STORAGES = {
    getattr(torch, f"{name}Storage"): dtype
    for name, dtype in (
        ("BFloat16", torch.bfloat16), ("Half", torch.float16), ("Float", torch.float32), ("Double", torch.float64),
        ("Long", torch.int64), ("Int", torch.int32), ("Short", torch.int16), ("Char", torch.int8),
        ("Byte", torch.uint8), ("Bool", torch.bool),
    )
}  # fmt: skip
_STORAGE_OF = {dtype: storage for storage, dtype in _STORAGES.items()}


@dataclass(frozen=True, slots=True)
class TorchSaveHeader:
    """`prefix`, then the tensor's bytes, then `suffix` are what `torch.load` reads."""

    prefix: bytes
    suffix: bytes
    nbytes: int

    @property
    def length(self) -> int:
        """Bytes of the whole."""
        return len(self.prefix) + self.nbytes + len(self.suffix)


@lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> TorchSaveHeader:
    """The frame of a contiguous tensor.

    Raises:
        CheckpointError: the format has no storage of that dtype.
    """
    if dtype not in _STORAGE_OF:
        raise CheckpointError(f"a distributed checkpoint holds no {dtype}; it must be {', '.join(map(str, _STORAGE_OF))}")
    nbytes = prod(shape) * dtype.itemsize
    records: list[tuple[bytes, int, int, int]] = []  # name, position of its header, size, crc
    prefix = io.BytesIO()
    for name, content in (("data.pkl", _pickled(dtype, shape)), ("version", _TORCH_VERSION_OF_FORMAT)):
        records.append((_ARCHIVE.encode() + name.encode(), prefix.tell(), len(content), zlib.crc32(content)))
        prefix.write(_local_header(*records[-1]) + content)
    records.append((_ARCHIVE.encode() + _DATA_RECORD.encode(), prefix.tell(), nbytes, 0))
    prefix.write(_local_header(*records[-1], data_may_start_at=prefix.tell()))
    return TorchSaveHeader(prefix.getvalue(), _directory(records, len(prefix.getvalue()) + nbytes), nbytes)


def find_tensor(file: BinaryIO, offset: int, length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The byte of the file at which the tensor's own begin, in the `length` bytes from `offset` on that `torch.save` wrote.

    `dtype` and `shape` are what is expected.

    Raises:
        CheckpointError: these bytes are no saved tensor, or another than expected.
    """
    file.seek(offset)
    if dtype in _STORAGE_OF:
        expected = frame(dtype, shape)
        if length == expected.length and file.read(len(expected.prefix)) == expected.prefix:
            return offset + len(expected.prefix)
    try:
        found_dtype, found_shape, start = _find_in_archive(file, offset, length)
    except (zipfile.BadZipFile, pickle.UnpicklingError, struct.error, KeyError, ValueError, TypeError, EOFError) as error:
        raise CheckpointError(f"no saved tensor ({error})") from None
    if (found_dtype, found_shape) != (dtype, shape):
        raise CheckpointError(f"{found_dtype} {list(found_shape)}, but {dtype} {list(shape)} in .metadata")
    return start


def _find_in_archive(file: BinaryIO, offset: int, length: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Dtype, shape and first byte of the tensor in an archive that somebody else wrote."""
    with zipfile.ZipFile(_Window(file, offset, length)) as archive:
        names = {name.split("/", 1)[-1]: name for name in archive.namelist()}
        dtype, numel, start, shape, strides, key = _Described(io.BytesIO(archive.read(names["data.pkl"]))).load()
        data = archive.getinfo(names[f"data/{key}"])
        if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
            raise ValueError("its bytes are not in little-endian order")
    if strides != torch.empty(shape, device="meta").stride() or data.file_size != numel * dtype.itemsize:
        raise ValueError("its bytes are not contiguous, or not as many as its shape says")
    file.seek(offset + data.header_offset)
    name_length, extra_length = struct.unpack("<26x2H", file.read(30))
    first = offset + data.header_offset + 30 + name_length + extra_length + start * dtype.itemsize
    if data.compress_type != zipfile.ZIP_STORED or (start + prod(shape)) > numel:
        raise ValueError("its bytes are compressed, or fewer than its shape says")
    return dtype, tuple(shape), first


class _Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise ValueError("seek before the start")
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        nbytes = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._offset + self._at)
        content = self._file.read(nbytes)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class _Described(pickle.Unpickler):
    """Unpickles a saved tensor to (dtype, storage's elements, start, shape, strides, record) and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, start, shape, strides, *_: (storage[0], storage[2], start, shape, strides, storage[1])
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage") and getattr(torch, name, None) in _STORAGES:
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        _, storage, key, _, numel = pid
        return _STORAGES[storage], key, numel


class _Rebuilt:
    """Pickles as torch pickles a contiguous tensor."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = torch.empty(self.shape, device="meta").stride()
        storage = _Storage(self.dtype, prod(self.shape))
        hooks: OrderedDict[str, Any] = OrderedDict()
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, strides, False, hooks)


@dataclass
class _Storage:
    dtype: torch.dtype
    numel: int


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", _STORAGE_OF[obj.dtype], "0", "cpu", obj.numel)
        return None


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    content = io.BytesIO()
    _Pickler(content, protocol=2).dump(_Rebuilt(dtype, shape))
    return content.getvalue()


def _local_header(name: bytes, position: int, size: int, crc: int, data_may_start_at: int | None = None) -> bytes:
    """A record's header; `data_may_start_at` asks for padding that aligns the data that follows."""
    extra = struct.pack("<2H2Q", _ZIP64_EXTRA_ID, 16, size, size) if size >= _ZIP64_FROM else b""
    if data_may_start_at is not None:
        padding = -(data_may_start_at + 30 + len(name) + len(extra) + 4) % _DATA_ALIGNMENT
        extra += struct.pack("<2H", _PADDING_EXTRA_ID, padding) + b"Z" * padding
    shown = min(size, _ZIP64_FROM)
    needed_version = 45 if size >= _ZIP64_FROM else 0
    fields = (needed_version, 0, 0, 0, 0, crc, shown, shown, len(name), len(extra))
    return struct.pack("<4s5H3I2H", b"PK\3\4", *fields) + name + extra


def _directory(records: list[tuple[bytes, int, int, int]], position: int) -> bytes:
    """The archive's table of contents, `position` bytes from its start."""
    table = b""
    for name, header_at, size, crc in records:
        extra = struct.pack("<2H2Q", _ZIP64_EXTRA_ID, 16, size, size) if size >= _ZIP64_FROM else b""
        shown = min(size, _ZIP64_FROM)
        fields = (0, 45 if extra else 0, 0, 0, 0, 0, crc, shown, shown, len(name), len(extra), 0, 0, 0, 0, header_at)
        table += struct.pack("<4s6H3I5H2I", b"PK\1\2", *fields) + name + extra
    end, count = b"", len(records)
    if position >= _ZIP64_FROM:
        end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(table), position)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, position + len(table), 1)
    end += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(table), min(position, _ZIP64_FROM), 0)
    return table + end
