"""Rows of a data set of the Hugging Face hub: which of its files a configuration and a split are, and the rows in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from megarl.config.sources import COMPRESSED
from megarl.config.yaml_tree import load_text
from megarl.data.data_source import DataSource, Row
from megarl.data.row_files import file_rows, kind_of_file
from megarl.errors import DataError, nearest
from megarl.system.hub import HubRepo, exactly

KINDS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Files of rows; where a split has several kinds, the first of these is read. `.json` beside others describes them."""
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names of files and folders, as `datasets` reads them; without any of these words, rows are for training."""


def hub_rows(source: DataSource, repo: HubRepo) -> Iterator[Row]:
    """The rows of the configuration `source.name` and the split `source.split` of `repo`, file after file.

    Raises:
        DataError: it cannot be downloaded, or has no such configuration or split, or no files of rows.
    """
    named = f"the data set is '{source.path}'"
    folder, files = repo.files(error=DataError, named=named)
    card = folder / "README.md"
    configurations = read_configurations(card.read_text(encoding="utf-8") if card.is_file() else "")
    chosen = choose_files(files, configurations, source.name, source.split, named=f"'{source.path}'")
    local = repo.pinned(folder).download(exactly(chosen), error=DataError, named=named)
    for name in chosen:
        file = local / name
        yield from file_rows(file, str(kind_of_file(file)))


def read_configurations(card: str) -> list[dict[str, Any]]:
    """The `configs` in the YAML head of a data set's card (README.md); none if it has none.

    https://huggingface.co/docs/hub/datasets-manual-configuration
    """
    head = re.match(r"---\s*\n(.*?)\n---", card, re.DOTALL)
    try:
        metadata = load_text(head[1]) if head else None
    except yaml.YAMLError:
        return []
    configurations = metadata.get("configs") if isinstance(metadata, dict) else None
    return [entry for entry in configurations or [] if isinstance(entry, dict) and "config_name" in entry]


def choose_files(
    files: Sequence[str], configurations: Sequence[Mapping[str, Any]], name: str | None, split: str | None, *, named: str
) -> list[str]:
    """The files of one split, sorted.

    Args:
        files: of the whole repository.
        configurations: what its card says of them; without any, names of folders and files say it.
        name: the configuration; None: the only or the default one.
        split: None: the only one.
        named: the data set, in errors.

    Raises:
        DataError: there is no such configuration or split, several and none is named, or no file of rows.
    """
    rows = [file for file in files if kind_of_file(PurePosixPath(file)) is not None]
    if not rows:
        raise DataError(
            f"{named} has no files of rows ({', '.join(KINDS)}); it has {', '.join(files[:5]) or 'nothing'}, and the hub may "
            "have it as Parquet at @refs/convert/parquet"
        )
    splits = _by_card(rows, configurations, name, named) if configurations else _by_names(rows, name, named)
    if split is None and len(splits) > 1:
        raise DataError(f"{named} has the splits {', '.join(splits)}; set split to one of them")
    chosen = splits.get(split) if split is not None else next(iter(splits.values()), None)
    if not chosen:
        raise DataError(f"{named} has no split '{split}'{nearest(split or '', splits)}; it has {', '.join(splits) or 'none'}")
    first = min(map(_rank, chosen))
    return sorted(file for file in chosen if _rank(file) == first)


def _rank(file: str) -> int:
    """The place of a file's kind among `KINDS`; `.ndjson` is another name of `.jsonl`."""
    name = file.lower().replace(".ndjson", ".jsonl")
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return KINDS.index(PurePosixPath(name).suffix)


def _by_card(
    rows: Sequence[str], configurations: Sequence[Mapping[str, Any]], name: str | None, named: str
) -> dict[str, list[str]]:
    names = [str(config["config_name"]) for config in configurations]
    usual = [config for config in configurations if config.get("default") or config["config_name"] == "default"]
    if name is not None:
        matches = [config for config in configurations if config["config_name"] == name]
    else:
        matches = usual[:1] or (list(configurations) if len(configurations) == 1 else [])
    if not matches:
        what = "several configurations" if name is None else f"no configuration '{name}'{nearest(name, names)}"
        raise DataError(f"{named} has {what}; set name to one of {', '.join(names)}")
    folder = str(matches[0].get("data_dir") or "").strip("./")
    data_files = matches[0].get("data_files")
    inside = [file for file in rows if not folder or file.startswith(f"{folder}/")]
    if data_files is None:
        return _by_words(inside, folder)
    entries = data_files if isinstance(data_files, list) else [data_files]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (str(entry["split"]), entry["path"]) if isinstance(entry, dict) else ("train", entry)
        for path in paths if isinstance(paths, list) else [paths]:
            pattern = _glob(f"{folder}/{path}" if folder else str(path))
            splits.setdefault(split, []).extend(file for file in inside if pattern.fullmatch(file))
    return {split: list(dict.fromkeys(matches)) for split, matches in splits.items()}


def _by_names(rows: Sequence[str], name: str | None, named: str) -> dict[str, list[str]]:
    if name is not None:
        inside = [file for file in rows if name in PurePosixPath(file).parts[:-1]]
        if not inside:
            folders = sorted({part for file in rows for part in PurePosixPath(file).parts[:-1]})
            raise DataError(
                f"{named} has no configuration '{name}'{nearest(name, folders)}; its card names none, and its folders are "
                f"{', '.join(folders) or 'none'}"
            )
        return _by_words(inside, "")
    tops = sorted({PurePosixPath(file).parts[0] for file in rows if "/" in file})
    words = {word for words in SPLIT_WORDS.values() for word in words}
    if len(tops) > 1 and not words & set(tops):
        raise DataError(f"{named} has several configurations; set name to one of {', '.join(tops)}")
    return _by_words(rows, "")


def _by_words(rows: Sequence[str], folder: str) -> dict[str, list[str]]:
    """Files by the split that a word in their names, or else in those of their folders, is for."""
    splits: dict[str, list[str]] = {}
    for file in rows:
        below = PurePosixPath(file).relative_to(folder).parts
        file_split = next((split for part in reversed(below) for split in SPLIT_WORDS if _says(part, split)), "train")
        splits.setdefault(file_split, []).append(file)
    return splits


def _says(part: str, split: str) -> bool:
    return re.search(rf"(?<![a-z])({'|'.join(SPLIT_WORDS[split])})(?![a-z])", part.lower()) is not None


def _glob(pattern: str) -> re.Pattern[str]:
    """A path's pattern as the hub means it: `*` stays within a folder, `**` does not."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern.removeprefix("./"))
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(wild.get(piece) or (piece if piece.startswith("[") else re.escape(piece)) for piece in pieces))
