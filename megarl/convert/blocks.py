"""Tensors as matrices that lie in boxes of files, and one of them written from others, a block of rows at a time.

Every conversion is this: a target (a tensor of a Hugging Face folder, or a parameter in a distributed checkpoint) is the
rows of some sources, one after the other. What is held in memory is a block, never a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megarl.errors import CheckpointError
from megarl.models.weight_formats import NumberFormat, tensors_of

BLOCK_BYTES = 2**20
"""Bytes read at a time: few enough to be hashed and written from the cache of one core."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous box of a matrix: `rows` x `cols` from (`row`, `col`) on, in a file from byte `offset` on."""

    file: str
    offset: int
    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor on disk: its first axis are the rows, all others the columns.

    Of one that is stored in a `format` of few bits, `beside` are its scales and, of some formats, its shape.
    """

    name: str
    dtype: torch.dtype
    rows: int
    cols: int
    extents: tuple[Extent, ...]
    format: NumberFormat | None = None
    beside: tuple[Matrix, ...] = ()

    @property
    def scales(self) -> Matrix | None:
        """The scales of a quantised tensor."""
        return self.beside[0] if self.beside else None

    @property
    def width(self) -> int:
        """Number of values of a row, of which several may be stored in one number."""
        return self.cols if self.format is None else self.format.width(self.cols)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without scales."""
        return self.rows * self.cols * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """`rows` rows of `source` from `start` on, or, `transposed`, so many of its columns; rows of zeros where that is None.

    `step`: only every second row or column is taken. `alternating`: the two halves of a row take turns in it.
    """

    source: Matrix | None
    start: int
    rows: int
    transposed: bool = False
    step: int = 1
    alternating: bool = False

    @property
    def cols(self) -> int:
        """Columns of a part that has a source."""
        assert self.source is not None
        return self.source.rows if self.transposed else self.source.width


@dataclass(frozen=True, slots=True)
class Task:
    """One tensor to write. The parts' rows are the target's, in this order; `names` are its extents', for their checksums."""

    target: Matrix
    parts: tuple[Part, ...]
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.target.nbytes + sum(matrix.nbytes for matrix in self.target.beside)

    def stored_dtype(self) -> torch.dtype | None:
        """The dtype that all parts are stored in and need no change from; None if there is no such."""
        sources = [part.source for part in self.parts if part.source is not None]
        dtypes = {source.dtype if source.format is None else None for source in sources}
        return dtypes.pop() if len(dtypes) == 1 else None

    def read(self, sources: Reader, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        """Rows `start:stop` of the target, from the parts they lie in, in the dtype of those.

        `buffer` `[stop - start, cols]` of `stored_dtype()` is filled and returned instead of a new tensor.
        """
        dtype = self.stored_dtype()
        if buffer is None and dtype is not None:
            buffer = torch.empty((stop - start, self.target.width), dtype=dtype)
        blocks: list[Tensor] = []
        at = 0
        for part in self.parts:
            first, last = max(start, at), min(stop, at + part.rows)
            row = first - at
            at += part.rows
            if first >= last:
                continue
            if buffer is not None:
                rows = buffer[first - start : last - start]
                if part.source is None:
                    rows.zero_()
                elif part.transposed or part.step > 1:
                    rows.copy_(sources.part(part, row, last - first))
                else:
                    sources.read_into(rows, part.source, part.start + row)
            elif part.source is None:
                blocks.append(torch.zeros((last - first, self.target.width), dtype=self.target.dtype))
            else:
                blocks.append(sources.part(part, row, last - first))
        if buffer is not None:
            return buffer
        common = blocks[0].dtype if len({rows.dtype for rows in blocks}) == 1 else torch.float32
        return torch.cat([rows.to(common) for rows in blocks])


def rows_and_cols(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix that a tensor of this shape is."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


class Files:
    """Files under a root folder, opened when first needed."""

    def __init__(self, root: Path, flags: int) -> None:
        self.root, self._flags = root, flags
        self._open: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self.root / name, self._flags)
        return self._open[name]

    def write(self, name: str, content: memoryview | bytes, offset: int) -> None:
        """Write all of `content` at byte `offset` of a file."""
        view, done = memoryview(content), 0
        while done < len(view):
            done += os.pwrite(self[name], view[done:], offset + done)

    def close(self) -> None:
        """Close them all."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


class Reader:
    """Reads blocks of rows of matrices whose files are under one folder."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._scales: dict[str, Tensor] = {}
        self._whole: tuple[Matrix, Tensor] | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def part(self, part: Part, row: int, rows: int) -> Tensor:
        """`rows` rows of a part that has a source, from its own `row` on."""
        assert part.source is not None
        start = part.start + row * part.step
        stop = start + (rows - 1) * part.step + 1
        values = (self.columns if part.transposed else self.rows)(part.source, start, stop)[:: part.step]
        return values.unflatten(1, (2, -1)).mT.flatten(1) if part.alternating else values

    def rows(self, source: Matrix, start: int, stop: int) -> Tensor:
        """Rows `start:stop`, `[stop - start, width]`; dequantised to bfloat16 where the matrix is quantised."""
        block = torch.empty((stop - start, source.cols), dtype=source.dtype)
        self.read_into(block, source, start)
        if source.scales is None or source.format is None:
            return block
        if source.scales.name not in self._scales:
            self._scales = {source.scales.name: self.rows(source.scales, 0, source.scales.rows)}
        values: Tensor = tensors_of(source.format).dequantised(block, self._scales[source.scales.name], source.format, start)
        return values.to(torch.bfloat16)

    def columns(self, source: Matrix, start: int, stop: int) -> Tensor:
        """Columns `start:stop` as rows, `[stop - start, rows]`. The matrix is read whole, and kept until another one is."""
        if self._whole is None or self._whole[0] != source:
            self._whole = source, self.rows(source, 0, source.rows)
        return self._whole[1][:, start:stop].T

    def blocks(self, source: Matrix) -> Iterator[Tensor]:
        """All rows, a block at a time."""
        step = rows_per_block(source.cols, source.dtype)
        for start in range(0, source.rows, step):
            yield self.rows(source, start, min(source.rows, start + step))

    def read_into(self, block: Tensor, source: Matrix, start: int) -> None:
        """Fill the contiguous `block`, `[R, cols]` of the source's dtype, with the values stored from row `start` on."""
        if not block.numel():
            return
        stop, size = start + len(block), source.dtype.itemsize
        for extent in source.extents:
            first, last = max(start, extent.row), min(stop, extent.row + extent.rows)
            if first >= last:
                continue
            offset = extent.offset + (first - extent.row) * extent.cols * size
            rows = block[first - start : last - start]
            if extent.cols == source.cols:
                self._fill(extent.file, _bytes(rows), offset)
            else:
                box = self._box(last - first, extent.cols, source.dtype)
                self._fill(extent.file, _bytes(box), offset)
                rows[:, extent.col : extent.col + extent.cols] = box

    def _box(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        nbytes = rows * cols * dtype.itemsize
        if len(self._scratch) < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(dtype).view(rows, cols)

    def _fill(self, file: str, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            got = os.preadv(self.files[file], [buffer[done:]], offset + done)
            if not got:
                raise CheckpointError(f"'{self.files.root / file}' is cut short: it ends at byte {offset + done}")
            done += got


class Writer:
    """Writes blocks of rows of one target, top to bottom, and hashes each of its extents on the way."""

    def __init__(self, files: Files, target: Matrix) -> None:
        self._files, self._target = files, target
        self._hashes = [xxhash.xxh3_64() for _ in target.extents]

    def write(self, block: Tensor, start: int) -> None:
        """Write rows from `start` on; `[rows, cols]` of the target's dtype."""
        size, stop = self._target.dtype.itemsize, start + len(block)
        if not block.numel():
            return
        for extent, seen in zip(self._target.extents, self._hashes, strict=True):
            first, last = max(start, extent.row), min(stop, extent.row + extent.rows)
            if first >= last:
                continue
            content = _bytes(block[first - start : last - start, extent.col : extent.col + extent.cols].contiguous())
            seen.update(content)
            self._files.write(extent.file, content, extent.offset + (first - extent.row) * extent.cols * size)

    def checksums(self) -> list[str]:
        """Checksums of the extents, in order, once all is written."""
        return [seen.hexdigest() for seen in self._hashes]


def run_task(task: Task, sources: Reader, files: Files, tick: Callable[[int], None]) -> list[str]:
    """Write the task's target; `tick` is told the bytes of each block. Returns the checksums of its extents (`task.names`)."""
    target = task.target
    writers = [Writer(files, matrix) for matrix in (target, *target.beside)]
    step = rows_per_block(target.width, torch.float32 if target.format else target.dtype)
    per_scale = target.format.rows_per_scale if target.format is not None else 1
    step = -(-step // per_scale) * per_scale
    stored = task.stored_dtype()
    buffer = torch.empty((min(step, target.rows), target.width), dtype=stored) if stored else None
    for start in range(0, target.rows, step):
        stop = min(target.rows, start + step)
        block = task.read(sources, start, stop, buffer[: stop - start] if buffer is not None else None)
        if target.format is not None:
            block, scales = tensors_of(target.format).stored_rows(block, target.format)
            writers[1].write(scales, start // per_scale)
        writers[0].write(block.to(target.dtype), start)
        tick(block.nbytes)
    for writer in writers[2:]:
        writer.write(torch.tensor([[target.rows], [target.width]]), 0)
    return [checksum for writer in writers for checksum in writer.checksums()]


def rows_per_block(cols: int, dtype: torch.dtype) -> int:
    """Number of rows of a matrix that make a block."""
    return max(1, BLOCK_BYTES // max(1, cols * dtype.itemsize))


def _bytes(contiguous: Tensor) -> memoryview:
    return contiguous.view(torch.uint8).numpy().reshape(-1).data


def extent_checksum(files: Files, extent: Extent, itemsize: int) -> str:
    """The checksum of what is on disk where `extent` lies; short files are as if filled with nothing."""
    seen = xxhash.xxh3_64()
    left, at = extent.rows * extent.cols * itemsize, extent.offset
    buffer = memoryview(bytearray(min(left, BLOCK_BYTES)))
    while left:
        got = os.preadv(files[extent.file], [buffer[: min(left, BLOCK_BYTES)]], at)
        if not got:
            break
        seen.update(buffer[:got])
        left, at = left - got, at + got
    return seen.hexdigest()


def target_extents(task: Task) -> Iterator[tuple[str, Extent, int]]:
    """(name, extent, bytes of an element) of everything a task writes, in the order of its checksums."""
    extents = [(extent, task.target.dtype.itemsize) for extent in task.target.extents]
    for matrix in task.target.beside:
        extents += [(extent, matrix.dtype.itemsize) for extent in matrix.extents]
    for name, (extent, itemsize) in zip(task.names, extents, strict=True):
        yield name, extent, itemsize
