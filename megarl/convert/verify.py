"""Whether two folders hold the same model, tensor by tensor, and whether one still holds what was written to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megarl.checkpoint.format.dist_format import is_dist_checkpoint
from megarl.convert.blocks import Files, Matrix, Part, Reader, Task, extent_checksum, rows_per_block
from megarl.convert.plan import RECORD, read_record
from megarl.convert.sources import ConversionSource, DistSource, HFSource, open_dist, open_hf
from megarl.errors import CheckpointError


@dataclass
class Tally:
    """The findings of a comparison: `differences` are sentences, `warnings` too."""

    tensors: int = 0
    nbytes: int = 0
    differences: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    checksums: dict[str, tuple[str, str]] = field(default_factory=dict)

    def count(self, matrix: Matrix, progress: Callable[[int, int], None] | None, total: int) -> None:
        """One more tensor was compared; `progress` is told the bytes so far, of `total`."""
        self.tensors += 1
        self.nbytes += matrix.nbytes
        if progress is not None:
            progress(self.nbytes, total)


HFTensor = tuple[tuple[int, ...], Task]
"""Shape of a Hugging Face tensor, and what reads its rows in whichever folder they are stored."""


def open_any(path: str | Path, hf_config_from: str | Path | None = None) -> ConversionSource:
    """A Hugging Face folder or a distributed checkpoint, by what is in it.

    Raises:
        CheckpointError, ModelError: it is neither, or damaged.
    """
    return open_dist(path, hf_config_from) if is_dist_checkpoint(Path(path)) else open_hf(path)


def hf_tensors(source: ConversionSource) -> dict[str, HFTensor]:
    """Every Hugging Face tensor of a model, by name."""
    return {
        name: (shape, _reading(name, parts, dtype))
        for rule in source.names.weight_map.bound_rules()
        for name, shape, parts, dtype in source.hf_parts(rule)
    }


def compare(left: ConversionSource, right: ConversionSource, progress: Callable[[int, int], None] | None = None) -> Tally:
    """Compare names, shapes, dtypes and every value, reading both once.

    Values of different dtypes are compared in the wider one. Values that are not finite are warned of.
    """
    tally = Tally()
    left_tensors, right_tensors = hf_tensors(left), hf_tensors(right)
    for name in left_tensors.keys() ^ right_tensors.keys():
        there, missing = (left, right) if name in left_tensors else (right, left)
        tally.differences.append(f"'{name}' is in '{there.path}', but not in '{missing.path}'")
    both = [name for name in left_tensors if name in right_tensors]
    total = sum(left_tensors[name][1].target.nbytes for name in both)
    with closing(Files(left.path, os.O_RDONLY)) as left_files, closing(Files(right.path, os.O_RDONLY)) as right_files:
        readers = Reader(left_files), Reader(right_files)
        for name in both:
            _compare_tensor(name, left_tensors[name], right_tensors[name], readers, tally)
            tally.count(left_tensors[name][1].target, progress, total)
    return tally


def check_record(source: ConversionSource, progress: Callable[[int, int], None] | None = None) -> Tally:
    """Compare what a converted folder holds with the checksums noted when it was written.

    Raises:
        CheckpointError: the folder has no such record, or a damaged one.
    """
    try:
        noted: dict[str, str] = read_record(source.path)["xxh3_64"]
    except FileNotFoundError:
        raise CheckpointError(
            f"'{source.path}' has no {RECORD}, so nothing says what was written to it; name a second folder to compare it with"
        ) from None
    tally = Tally()
    stored = dict(_stored(source))
    for name in noted.keys() ^ stored.keys():
        tally.differences.append(f"'{name}' is {'missing' if name in noted else 'not in ' + RECORD}")
    total = sum(matrix.nbytes for matrix in stored.values())
    with closing(Files(source.path, os.O_RDONLY)) as files:
        for name, matrix in stored.items():
            checksum = extent_checksum(files, matrix.extents[0], matrix.dtype.itemsize)
            if checksum != noted.get(name, checksum):
                tally.differences.append(f"'{name}' has checksum {checksum}, but was written with {noted[name]}")
            tally.checksums[name] = (checksum, noted.get(name, ""))
            tally.count(matrix, progress, total)
    return tally


def _reading(name: str, parts: tuple[Part, ...], dtype: torch.dtype) -> Task:
    """The parts as a task that only reads."""
    cols = next(part.cols for part in parts if part.source is not None)
    return Task(Matrix(name, dtype, sum(part.rows for part in parts), cols, ()), parts, ())


def _stored(source: ConversionSource) -> Iterator[tuple[str, Matrix]]:
    """Every tensor or chunk that a folder stores, by the name that its record gives it."""
    if isinstance(source, HFSource):
        yield from source.matrices.items()
    elif isinstance(source, DistSource) and source.dist is not None:
        yield from source.stored_chunks()


def _compare_tensor(name: str, mine: HFTensor, theirs: HFTensor, readers: tuple[Reader, Reader], tally: Tally) -> None:
    (shape, task), (other_shape, other) = mine, theirs
    if shape != other_shape:
        tally.differences.append(f"'{name}' has shape {list(shape)} and {list(other_shape)}")
        return
    hashes = xxhash.xxh3_64(), xxhash.xxh3_64()
    largest, not_finite = 0.0, 0
    target = task.target
    step = rows_per_block(target.cols, torch.float32)
    for start in range(0, target.rows, step):
        stop = min(target.rows, start + step)
        blocks = [side.read(reader, start, stop) for side, reader in zip((task, other), readers, strict=True)]
        for block, seen in zip(blocks, hashes, strict=True):
            seen.update(block.contiguous().view(torch.uint8).numpy().reshape(-1).data)
        not_finite += int((~torch.isfinite(blocks[0])).sum()) + int((~torch.isfinite(blocks[1])).sum())
        largest = max(largest, _largest_difference(*blocks))
    tally.checksums[name] = (hashes[0].hexdigest(), hashes[1].hexdigest())
    if not_finite:
        tally.warnings.append(
            f"'{name}' has values that are not finite (NaN or infinity): {not_finite} in both folders together"
        )
    if target.dtype != other.target.dtype:
        dtypes = f"{target.dtype} and {other.target.dtype}".replace("torch.", "")
        tally.differences.append(f"'{name}' is {dtypes}, the largest difference of its values is {largest:.3g}")
    elif hashes[0].digest() != hashes[1].digest():
        tally.differences.append(
            f"'{name}' has other values: checksums {' and '.join(tally.checksums[name])}, largest difference {largest:.3g}"
        )


def _largest_difference(left: Tensor, right: Tensor) -> float:
    if left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
        return 0.0
    return float((left.double() - right.double()).abs().max()) if left.numel() else 0.0
