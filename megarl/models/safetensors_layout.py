"""The places of tensors in a safetensors file: headers read for their byte offsets, and laid out before anything is written.

The safetensors library reads and writes whole tensors; streaming them in blocks, from several processes, needs the offsets.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megarl.errors import ModelError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of dtypes."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES, _MAX_HEADER_BYTES, _ALIGNMENT = 8, 100_000_000, 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: `nbytes` from byte `offset` of the file on, contiguous and row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return prod(self.shape) * self.dtype.itemsize


def read_entries(path: Path) -> dict[str, Entry]:
    """Every tensor of the file, by name.

    Raises:
        ModelError: the file is no safetensors file, is cut short, names a tensor twice or has bytes that no tensor owns.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe would be waited for
            raise ModelError(f"'{path}' is no file of weights")
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(_LENGTH_BYTES).ljust(_LENGTH_BYTES, b"\0"))[0]
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise ModelError(f"'{path}' is damaged or cut short: its header does not fit into its {size} bytes")
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        entries = {name: _entry(value, _LENGTH_BYTES + length) for name, value in header.items() if name != "__metadata__"}
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror}") from None
    except _DuplicateError as error:
        raise ModelError(f"'{path}' names the tensor '{error}' twice; each name may come once") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"'{path}' is damaged: its header is no safetensors header ({error!r})") from None
    _check_offsets(path, size, _LENGTH_BYTES + length, header, entries)
    return entries


def header_and_entries(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
) -> tuple[bytes, dict[str, Entry]]:
    """The first bytes of a file that holds these tensors in this order, and where each lies in the file."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    relative: dict[str, Entry] = {}
    at = 0
    for name, dtype, shape in tensors:
        entry = Entry(dtype, tuple(shape), at)
        described[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + entry.nbytes]}
        relative[name] = entry
        at += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: Entry(e.dtype, e.shape, e.offset + len(header)) for name, e in relative.items()}


class _DuplicateError(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        raise _DuplicateError(next(name for name, count in counted.items() if count > 1))
    return mapping


def read_json_without_duplicates(path: Path) -> Any:
    """The JSON value of a file.

    Raises:
        ModelError: an object names a key twice.
        ValueError: it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except _DuplicateError as error:
        raise ModelError(f"'{path}' names '{error}' twice; each name may come once") from None


def _entry(value: dict[str, Any], data_start: int) -> Entry:
    first, last = value["data_offsets"]
    numbers = [first, last, *value["shape"]]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{value} has other numbers than sizes")
    entry = Entry(DTYPES[value["dtype"]], tuple(value["shape"]), data_start + first)
    if entry.nbytes != last - first:
        raise ValueError(f"{value} contradicts itself")
    return entry


def _check_offsets(path: Path, size: int, data_start: int, header: dict[str, Any], entries: dict[str, Entry]) -> None:
    at = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != at:
            raise ModelError(f"'{path}' is damaged: the bytes of tensor '{name}' do not follow those before it")
        at += entry.nbytes
    if at != size:
        raise ModelError(f"'{path}' is damaged or cut short: it has {size} bytes, but its header describes {at}")
