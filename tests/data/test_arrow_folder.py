"""Folders of Arrow and Parquet files give the rows that were written, under the names that the run wants."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megarl.config.sources import SourceConfig
from megarl.data.prompts import load_rows
from megarl.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"problem": f"q{n} – ü", "messages": [{"role": "user", "content": str(n)}], "n": n} for n in range(25)
]


def _write(file: Path, rows: list[dict[str, Any]], kind: str) -> None:
    table = pyarrow.Table.from_pylist(rows)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file)
        return
    new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(file), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def _saved_to_disk(folder: Path) -> None:
    """What `Dataset.save_to_disk` leaves: streams, listed in order in state.json, whose names need not sort that way."""
    folder.mkdir(parents=True)
    _write(folder / "z.arrow", ROWS[:10], "stream")
    _write(folder / "a.arrow", ROWS[10:], "stream")
    _write(folder / "cache-1.arrow", ROWS[:3], "stream")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "z.arrow"}, {"filename": "a.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")


def _source(folder: Path, **fields: Any) -> SourceConfig:
    return SourceConfig(source="dataset", path=str(folder), **fields)


def test_a_saved_dataset_gives_the_rows_of_its_listed_files_in_their_order(tmp_path: Path) -> None:
    _saved_to_disk(tmp_path / "train")
    assert load_rows(_source(tmp_path / "train")) == ROWS
    assert load_rows(_source(tmp_path / "train", limit=12)) == ROWS[:12]


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_a_folder_of_files_gives_their_rows_in_the_order_of_their_names(tmp_path: Path, kind: str) -> None:
    suffix = "parquet" if kind == "parquet" else "arrow"
    _write(tmp_path / f"train-00001.{suffix}", ROWS[10:], kind)
    _write(tmp_path / f"train-00000.{suffix}", ROWS[:10], kind)
    (tmp_path / "README.md").write_text("not rows")
    assert load_rows(_source(tmp_path)) == ROWS


def test_a_split_is_a_folder_inside(tmp_path: Path) -> None:
    _saved_to_disk(tmp_path / "both" / "train")
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert load_rows(_source(tmp_path / "both", split="train")) == ROWS
    with pytest.raises(DataError, match=r"both' has no split 'trian' \(did you mean 'train'\?\); it has train, test"):
        load_rows(_source(tmp_path / "both", split="trian"))
    with pytest.raises(DataError, match=r"train' is one split, but split is 'train'; remove split"):
        load_rows(_source(tmp_path / "both" / "train", split="train"))


def test_what_is_wrong_with_a_folder_is_one_sentence(tmp_path: Path) -> None:
    _saved_to_disk(tmp_path / "both" / "train")
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        DataError, match=r"both' holds several splits; set split, or let the path be .* of them: '.*both/train', '.*both/test'"
    ):
        load_rows(_source(tmp_path / "both"))
    with pytest.raises(DataError, match=r"trian' is no folder \(did you mean '.*train'\?\); a dataset source needs one"):
        load_rows(_source(tmp_path / "both" / "trian"))
    (tmp_path / "both" / "train" / "a.arrow").unlink()
    with pytest.raises(DataError, match=r"is incomplete: its state\.json lists a\.arrow"):
        load_rows(_source(tmp_path / "both" / "train"))
    (tmp_path / "both" / "train" / "state.json").write_text("[")
    with pytest.raises(DataError, match=r"state\.json' is not what datasets writes: JSONDecodeError"):
        load_rows(_source(tmp_path / "both" / "train"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "rows.txt").write_text("a")
    with pytest.raises(DataError, match=r"text' holds no files of rows \(\.arrow, \.jsonl, .*\); it has rows\.txt"):
        load_rows(_source(tmp_path / "text"))


@pytest.mark.parametrize("start", [b"", b"ARROW1", b"\xff\xff\xff\xff"])
def test_random_bytes_never_give_a_traceback(tmp_path: Path, start: bytes) -> None:
    random = Random(1)
    for size in (0, 3, 40, 200):
        for suffix in ("arrow", "parquet"):
            folder = tmp_path / f"{size}{suffix}"
            folder.mkdir()
            (folder / f"x.{suffix}").write_bytes(start + random.randbytes(size))
            with pytest.raises(DataError, match=str(folder)):
                load_rows(_source(folder))


def test_fields_give_rows_new_names_and_keep_the_others(tmp_path: Path) -> None:
    _write(tmp_path / "x.parquet", ROWS, "parquet")
    rows = load_rows(_source(tmp_path, columns={"question": "problem", "problem": "n"}))
    assert rows == [{**row, "question": row["problem"], "problem": row["n"]} for row in ROWS]
    with pytest.raises(
        DataError, match=r"row 0 .* no key 'problm' \(columns\.question\) \(did you mean 'problem'\?\); it has prob"
    ):
        load_rows(_source(tmp_path, columns={"question": "problm"}))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": 1}\n\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"^'.*rows\.jsonl' line 3 has no key 'q'"):
        load_rows(SourceConfig(source="jsonl", path=str(file), columns={"question": "q"}))
