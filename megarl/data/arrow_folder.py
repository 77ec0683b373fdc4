"""Rows of a folder of Arrow or Parquet files, such as Hugging Face `datasets` writes with `save_to_disk`.

Read with pyarrow alone: the folder's `state.json` lists its files in order, and they are plain Arrow streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.data.rows import DataSource, Row
from megarl.errors import DataError, nearest


def dataset_rows(source: DataSource) -> Iterator[Row]:
    """Rows of the folder `source.path`, file after file.

    Raises:
        DataError: there is no such folder, it holds several splits or no files of rows, or a file is damaged.
    """
    folder = Path(source.path or "")
    if not folder.is_dir():
        siblings = [str(p) for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise DataError(
            f"'{source.path}' is no folder{nearest(str(folder), siblings)}; a dataset source needs one, or ORG/NAME of the hub "
            "(hf://ORG/NAME where a folder ORG is here)"
        )
    if source.split is not None:
        folder = _split_of(folder, source.split)
    for file in _files(folder):
        yield from table_rows(file, file.suffix.removeprefix("."))


def _split_of(folder: Path, split: str) -> Path:
    """The folder of a split inside one that has several."""
    if not (folder / "dataset_dict.json").is_file():
        raise DataError(f"'{folder}' is one split, but split is '{split}'; remove split")
    splits = [str(name) for name in _read(folder / "dataset_dict.json", "splits")]
    if split not in splits:
        raise DataError(f"'{folder}' has no split '{split}'{nearest(split, splits)}; it has {', '.join(splits)}")
    return folder / split


def _files(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(f"'{folder / str(split)}'" for split in _read(folder / "dataset_dict.json", "splits"))
        raise DataError(f"'{folder}' holds several splits; set split, or let the path be that of one of them: {splits}")
    if (folder / "state.json").is_file():
        files = [folder / str(entry["filename"]) for entry in _read(folder / "state.json", "_data_files")]
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise DataError(f"'{folder}' is incomplete: its state.json lists {missing[0].name}, which is not there")
        return files
    files = sorted(file for file in folder.iterdir() if file.suffix in (".arrow", ".parquet"))
    if not files:
        names = ", ".join(sorted(file.name for file in folder.iterdir())[:5]) or "nothing"
        raise DataError(f"'{folder}' holds no .arrow or .parquet files; it has {names}")
    return files


def _read(file: Path, key: str) -> list[Any]:
    try:
        return list(json.loads(file.read_text())[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{file}' is not what datasets writes: {type(error).__name__}: {error}") from None


def table_rows(file: Path, kind: str) -> Iterator[Row]:
    """Rows of one file; `kind` is `parquet` or `arrow` (a stream, as `datasets` writes, or a file with an index).

    Raises:
        DataError: the file is damaged.
    """
    import pyarrow

    try:
        for batch in _parquet_batches(file) if kind == "parquet" else _arrow_batches(file):
            batch.validate(full=True)  # a damaged file could else lead outside its buffers, and end the process
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"'{file}' cannot be read as {kind}: {error}") from None


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
