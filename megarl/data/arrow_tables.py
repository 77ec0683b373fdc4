"""Rows of Arrow and Parquet files, read with pyarrow alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.data.data_source import Row
from megarl.errors import DataError


def table_rows(file: Path, kind: str, *, named: Path | None = None) -> Iterator[Row]:
    """Rows of one file; `kind` is `parquet` or `arrow` (a stream, as `datasets` writes, or a file with an index).

    `named` stands in errors; None: the file.

    Raises:
        DataError: the file is damaged.
    """
    import pyarrow

    try:
        for batch in _parquet_batches(file) if kind == "parquet" else _arrow_batches(file):
            batch.validate(full=True)  # a damaged file could else lead outside its buffers, and end the process
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"'{named or file}' cannot be read as {kind}: {error}") from None


def _parquet_batches(file: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        yield from table.iter_batches(batch_size=128)  # rows may hold pictures


def _arrow_batches(file: Path) -> Iterator[Any]:
    import pyarrow.ipc

    with pyarrow.OSFile(str(file)) as opened:
        has_index = opened.read(6) == b"ARROW1"
        opened.seek(0)
        if not has_index:
            with pyarrow.ipc.open_stream(opened) as stream:
                yield from stream
            return
        with pyarrow.ipc.open_file(opened) as reader:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
