"""The files of rows in a folder: those that Hugging Face `datasets` wrote with `save_to_disk`, or shards of any kind.

The `state.json` of `save_to_disk` lists its files in order. Other folders are told apart by names, as data sets of the hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.data.data_source import DataSource, Row
from megarl.data.row_files import TABLES, allowed_endings, file_rows, kind_of_file, numbered_rows
from megarl.errors import DataError, MegarlError, nearest

File = tuple[Path, str]
"""A file of rows and the kind that it is read as."""


def local_rows(source: DataSource) -> Iterator[Row]:
    """Rows of what lies under `source.path`: a file, or a folder's files one after the other.

    Raises:
        DataError: there is nothing, it holds several splits, several kinds or no files of rows, or a file is damaged.
    """
    for file, kind in files_of(source):
        yield from file_rows(file, kind)


def files_of(source: DataSource) -> list[File]:
    """The files of rows that `source` reads, in their order.

    Raises:
        DataError: as `local_rows`, but for damage.
    """
    path = Path(source.path or "")
    if path.is_dir():
        return _files_in(path, source)
    if not path.is_file():
        siblings = [str(p) for p in path.parent.iterdir() if p != path] if path.parent.is_dir() else []
        what, needs = "no file", f"a {source.source} source needs one"
        if source.source == "dataset" and not path.suffix:
            what = "no folder"
            needs = "a dataset source needs one, or ORG/NAME of the hub (hf://ORG/NAME where a folder ORG is here)"
        raise DataError(f"'{source.path}' is {what}{nearest(str(path), siblings)}; {needs}")
    kind = kind_of_file(path) if source.source == "dataset" else source.source
    if kind is None:
        raise DataError(
            f"'{path}' is a file whose ending tells no kind of rows; it must end in {allowed_endings()}, or source must "
            "say the kind (jsonl, csv, tsv or parquet)"
        )
    return [(path, kind)]


def line_of_row(source: DataSource, number: int) -> str | None:
    """The place of row `number` (counted from 0) in words: its line, and its file in a folder; None if it has no line."""
    try:
        files = files_of(source)
        if any(kind in TABLES for _, kind in files):
            return None
        lines = ((file, line) for file, kind in files for line, _ in numbered_rows(file, kind))
        file, line = next(islice(lines, number, None))
    except (MegarlError, StopIteration, OSError):
        return None
    return f"line {line}" + (f" of '{file.name}'" if len(files) > 1 else "")


def _files_in(folder: Path, source: DataSource) -> list[File]:
    if (folder / "dataset_dict.json").is_file() and source.split is not None:
        folder = _split_of(folder, source.split)
    elif source.split is not None and (folder / "state.json").is_file():
        raise DataError(f"'{folder}' is one split, but split is '{source.split}'; remove split")
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(f"'{folder / str(split)}'" for split in _read(folder / "dataset_dict.json", "splits"))
        raise DataError(f"'{folder}' holds several splits; set split, or let the path be that of one of them: {splits}")
    if (folder / "state.json").is_file():
        files = [folder / str(entry["filename"]) for entry in _read(folder / "state.json", "_data_files")]
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise DataError(f"'{folder}' is incomplete: its state.json lists {missing[0].name}, which is not there")
        return [(file, "arrow") for file in files]
    return _shards(folder, source)


def _split_of(folder: Path, split: str) -> Path:
    """The folder of a split inside one that has several."""
    splits = [str(name) for name in _read(folder / "dataset_dict.json", "splits")]
    if split not in splits:
        raise DataError(f"'{folder}' has no split '{split}'{nearest(split, splits)}; it has {', '.join(splits)}")
    return folder / split


def _shards(folder: Path, source: DataSource) -> list[File]:
    """The files of rows in and below `folder`, of one split, of one kind."""
    below = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    names = [str(name) for name in below if not any(part.startswith((".", "_")) for part in name.parts)]
    kinds = {name: kind for name in names if (kind := kind_of_file(Path(name))) is not None}
    if source.source != "dataset":
        kinds = {name: kind for name, kind in kinds.items() if kind == source.source}
    elif set(kinds.values()) > {"jsonl"}:  # `.json` files beside rows of another kind describe them
        kinds = {name: kind for name, kind in kinds.items() if ".json" not in Path(name).suffixes}
    if not kinds:
        of_kind = f" that a {source.source} source reads" if source.source != "dataset" else ""
        allowed = f".arrow, {allowed_endings()}"
        raise DataError(f"'{folder}' holds no files of rows{of_kind} ({allowed}); it has {', '.join(names[:5]) or 'nothing'}")
    if len(found := sorted(set(kinds.values()))) > 1:
        raise DataError(f"'{folder}' holds files of several kinds ({', '.join(found)}); set source to one of them")
    return [(folder / name, kinds[name]) for name in _of_one_split(folder, list(kinds), source)]


def _of_one_split(folder: Path, names: list[str], source: DataSource) -> list[str]:
    from megarl.data.hub_dataset import choose_files, read_configurations

    card = folder / "README.md"
    configurations = read_configurations(card.read_text(encoding="utf-8", errors="replace") if card.is_file() else "")
    return choose_files(names, configurations, source.name, source.split, named=f"'{folder}'")


def _read(file: Path, key: str) -> list[Any]:
    try:
        return list(json.loads(file.read_text())[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{file}' is not what datasets writes: {type(error).__name__}: {error}") from None
