"""The kind of a folder of weights, and what a conversion would do: rows for a table, nothing read but headers and metadata."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint.format.dist_format import DistFolder, is_dist_checkpoint
from megarl.convert.blocks import BLOCK_BYTES
from megarl.convert.plan import RECORD, ConversionPlan, gib, read_record
from megarl.convert.sources import HF_SUBFOLDER
from megarl.errors import ModelError, counted
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import architecture_for, load_hf_config

TableRow = tuple[str, str]
_TRIAL_BYTES = 128 * 2**20
_MOST_RANKS_SHOWN = 16


@dataclass(frozen=True)
class ListedTensor:
    """A tensor or key of a folder; `pieces` are chunks, or 1."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


def inspect(path: str | Path) -> tuple[list[TableRow], list[ListedTensor]]:
    """(facts, tensors) of a Hugging Face folder or a distributed checkpoint.

    Raises:
        CheckpointError, ModelError: it is neither, or damaged.
    """
    folder = Path(path)
    return _dist(folder) if is_dist_checkpoint(folder) else _hugging_face(folder)


def describe(plan: ConversionPlan, bytes_per_s: float, *, shards: int, rate_is_measured: bool) -> list[TableRow]:
    """Describe what carrying out a plan would do."""
    written, moved = plan.bytes_written, plan.bytes_read + plan.bytes_written
    seconds = written / bytes_per_s / shards
    how = "a copy of 128 MiB here" if rate_is_measured else "--rate"
    rows = [
        ("source", str(plan.source.path)),
        ("tensors written", f"{len(plan.tasks):,}, in {sum(len(task.names) for task in plan.tasks):,} pieces"),
        ("bytes read", gib(plan.bytes_read)),
        ("bytes written", f"{gib(written)} in {counted(len(plan.files), 'file')}"),
        ("largest tensor", gib(plan.largest_tensor_bytes)),
        ("memory of a worker", f"{plan.block_bytes / 2**20:.0f} MiB of blocks"),
        ("bytes moved", gib(moved)),
        (
            "predicted time",
            f"{seconds:.0f} s at {bytes_per_s / 1e9:.2f} GB/s ({how})" + (f", {shards} shards" if shards > 1 else ""),
        ),
    ]
    sizes = list(plan.files.items())
    if len(sizes) <= _MOST_RANKS_SHOWN:
        return rows + [(f"  {name}", gib(size)) for name, size in sizes]
    smallest, largest = (pick(sizes, key=lambda item: item[1]) for pick in (min, max))
    return [*rows, (f"  smallest: {smallest[0]}", gib(smallest[1])), (f"  largest: {largest[0]}", gib(largest[1]))]


def measure_rate(folder: Path) -> float:
    """Bytes per second of reading and writing a file here, by copying one of 128 MiB block by block."""
    while not folder.is_dir():
        folder = folder.parent
    block = os.urandom(BLOCK_BYTES)
    first, second = (folder / f".megarl-rate-{os.getpid()}-{number}" for number in range(2))
    try:
        with first.open("wb") as file:
            for _ in range(_TRIAL_BYTES // BLOCK_BYTES):
                file.write(block)
        started = time.perf_counter()
        with first.open("rb") as source, second.open("wb") as target:
            while content := source.read(BLOCK_BYTES):
                target.write(content)
        return _TRIAL_BYTES / (time.perf_counter() - started)
    finally:
        for path in (first, second):
            path.unlink(missing_ok=True)


def _hugging_face(folder: Path) -> tuple[list[TableRow], list[ListedTensor]]:
    read = HFFolder(folder)
    tensors = [ListedTensor(name, entry.dtype, entry.shape, 1) for name, (_, entry) in read.entries().items()]
    files = {file for file, _ in read.entries().values()}
    rows = [("kind", "Hugging Face folder"), *_config_rows(folder), *_tensor_rows(tensors), ("files", str(len(files)))]
    return rows + _record_rows(folder), tensors


def _dist(folder: Path) -> tuple[list[TableRow], list[ListedTensor]]:
    read = DistFolder(folder)
    all_keys = [ListedTensor(name, key.dtype, key.shape, len(key.chunks)) for name, key in read.keys.items()]
    optimizer = [tensor for tensor in all_keys if tensor.name.startswith("optimizer.")]
    places = {(chunk.file, chunk.offset): name for name, key in reversed(read.keys.items()) for chunk in key.chunks}
    first_names = set(places.values())
    tensors = [tensor for tensor in all_keys if tensor not in optimizer and tensor.name in first_names]
    files = {chunk.file for key in read.keys.values() for chunk in key.chunks}
    config = folder / HF_SUBFOLDER
    rows = [("kind", "megatron-core distributed checkpoint (torch_dist)")]
    rows += _config_rows(config) if (config / "config.json").is_file() else [("model", "not said (no hf/config.json)")]
    rows += [*_tensor_rows(tensors), ("chunks", f"{sum(t.pieces for t in tensors):,}"), ("files", str(len(files)))]
    if optimizer:
        rows.append(("optimizer state", f"{len(optimizer):,} keys, {gib(sum(t.nbytes for t in optimizer))}"))
    rows.append(("objects", f"{len(read.objects):,}"))
    return rows + _record_rows(folder), tensors


def _config_rows(folder: Path) -> list[TableRow]:
    config = load_hf_config(folder)
    name = (config.get("architectures") or [config.get("model_type")])[0]
    config = {**config, **_decoder_of(config)}
    shown = ("num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings")
    return [("model", f"{name}, " + ", ".join(f"{field}={config[field]}" for field in shown if field in config))]


def _decoder_of(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return architecture_for(config).text_config(config)
    except ModelError:  # of a family that megarl does not know
        return {}


def _tensor_rows(tensors: Iterable[ListedTensor]) -> list[TableRow]:
    tensors = list(tensors)
    by_dtype: dict[str, int] = {}
    for tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        by_dtype[dtype] = by_dtype.get(dtype, 0) + prod(tensor.shape)
    return [
        ("tensors", f"{len(tensors):,}"),
        ("elements", ", ".join(f"{count:,} {dtype}" for dtype, count in by_dtype.items())),
        ("bytes", gib(sum(tensor.nbytes for tensor in tensors))),
        ("largest", max(((t.nbytes, f"{t.name} {list(t.shape)}, {gib(t.nbytes)}") for t in tensors), default=(0, "none"))[1]),
    ]


def _record_rows(folder: Path) -> list[TableRow]:
    if not (folder / RECORD).is_file():
        return []
    record = read_record(folder)
    layout = record.get("layout")
    rows = [("made by", f"{record.get('made_by')} from {record.get('source')}")]
    if layout is not None:
        rows.append(("layout", ",".join(f"{name}={value}" for name, value in layout.items()) or "one rank"))
    return [*rows, ("checksums", f"{len(record.get('xxh3_64', {})):,} in {RECORD}")]
