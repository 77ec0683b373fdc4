"""Files of rows of every kind give the rows that were written, and one sentence for everything that can be wrong with them.

References: `json.dumps` and `csv.writer` of Python, pyarrow's Parquet writer, and the lists that they were given.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megarl.config.source_checks import check_source
from megarl.config.sources import SourceConfig, held_out_defaults
from megarl.data import json_rows, row_files, row_lines
from megarl.data.prompts import load_rows
from megarl.data.rows import Origin, RowPlace
from megarl.errors import ConfigError, DataError

ROWS: list[dict[str, str]] = [
    {"question": f'Say "{n}", – ü,\nplease\t!', "answer": f"{n:03}", "hint": "" if n % 2 else "short"} for n in range(300)
]
NESTED: list[dict[str, Any]] = [{**row, "messages": [{"role": "user", "content": row["answer"]}]} for row in ROWS]
KINDS = ("jsonl", "ndjson", "json", "csv", "tsv", "parquet")


def written(rows: list[dict[str, Any]], ending: str) -> bytes:
    """`rows` as the bytes of a file with `ending`, by writers that megarl has no part in."""
    if ending == "parquet":
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        return sink.getvalue()
    if ending == "json":
        return json.dumps(rows).encode()
    if ending in ("csv", "tsv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), delimiter="," if ending == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def packed(content: bytes, packing: str) -> bytes:
    if packing == ".gz":
        return gzip.compress(content)
    if packing == ".zst":
        return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True))
    return content


def read(file: Path, **fields: Any) -> list[dict[str, Any]]:
    return load_rows(SourceConfig(path=str(file), **fields))


def refused(file: Path, content: bytes | str, **fields: Any) -> str:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        read(file, **fields)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", KINDS)
def test_a_file_of_every_kind_gives_its_rows_without_a_source(ending: str, packing: str, tmp_path: Path) -> None:
    for name in (f"rows.{ending}{packing}", f"ROWS.{ending.upper()}{packing.upper()}"):
        file = tmp_path / name
        file.write_bytes(packed(written(ROWS, ending), packing))
        assert read(file) == ROWS
        assert read(file, limit=7) == ROWS[:7]
    if ending not in ("csv", "tsv"):
        file.write_bytes(packed(written(NESTED, ending), packing))
        assert read(file) == NESTED


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"path": "a.jsonl"}, "jsonl"),
        ({"path": "a.JSON.gz"}, "jsonl"),
        ({"path": "a.csv.zst"}, "csv"),
        ({"path": "a.parquet", "source": None}, "parquet"),
        ({"path": "a.csv", "source": "jsonl"}, "jsonl"),
        ({"path": "folder"}, "dataset"),
        ({"path": "ORG/NAME"}, "dataset"),
        ({"path": "hf://ORG/NAME.csv"}, "dataset"),
        ({"name": "chain_sum"}, "reasoning_gym"),
        ({"name": "rows.py:make"}, "python"),
        ({"parts": [{"path": "a.csv"}]}, "mixture"),
        ({}, "reasoning_gym"),
    ],
)
def test_the_kind_of_a_source_is_told_by_its_path_unless_it_is_given(fields: dict[str, Any], kind: str) -> None:
    assert SourceConfig(**fields).source == kind
    assert SourceConfig.model_validate(SourceConfig(**fields).model_dump()).source == kind


def test_held_out_rows_of_a_file_have_no_limit_of_generated_ones() -> None:
    assert held_out_defaults({"eval": {"path": "a.csv"}}, "eval") == {"eval": {"path": "a.csv"}}
    assert held_out_defaults({"eval": {"name": "chain_sum"}}, "eval")["eval"]["limit"] == 200


def test_a_source_of_a_file_needs_a_path() -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.source = 'csv' needs the file of rows: set data\.train\.path"):
        check_source("data.train", SourceConfig(source="csv"))


JSON_FORMS = {
    "a list on one line": json.dumps(NESTED),
    "a list on many lines": json.dumps(NESTED, indent=2),
    "a list under data": json.dumps({"data": NESTED}),
    "a list under data among others": json.dumps({"version": [1, {"data": 2}], "data": NESTED, "licence": "MIT"}, indent=1),
    "lines": "".join(json.dumps(row) + "\n" for row in NESTED),
    "lines after empty ones": "\n\n" + "\n\n".join(json.dumps(row) for row in NESTED),
    "with a byte order mark": "\ufeff" + json.dumps(NESTED),
}


@pytest.mark.parametrize("block", [3, 64, 1 << 20])
@pytest.mark.parametrize("form", JSON_FORMS)
def test_a_json_file_may_be_a_list_an_object_with_data_or_lines(
    form: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "BLOCK", block)
    (tmp_path / "rows.json").write_text(JSON_FORMS[form])
    assert read(tmp_path / "rows.json") == NESTED


def test_a_row_of_json_lines_may_have_a_list_under_data(tmp_path: Path) -> None:
    rows = [{"data": [{"a": 1}], "b": n} for n in range(2)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path / "rows.json") == rows
    (tmp_path / "one.json").write_text('{"data": [], "question": "q"}')
    assert read(tmp_path / "one.json") == [{"data": [], "question": "q"}]


def test_cells_of_csv_are_text_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b'\xef\xbb\xbfid,answer,empty\r\n007,1e5,\r\n\r\n"a ""b""\r\nc",true,"x,y"\r\n')
    assert read(tmp_path / "rows.csv") == [
        {"id": "007", "answer": "1e5", "empty": ""},
        {"id": 'a "b"\r\nc', "answer": "true", "empty": "x,y"},
    ]
    (tmp_path / "long.csv").write_text(f"a\n{'x' * 300_000}\n")  # longer than Python's own limit of a cell
    assert read(tmp_path / "long.csv") == [{"a": "x" * 300_000}]


def test_numbers_in_cells_are_numbers_where_numbers_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,pass_rate\na,0.1\nb,.5\nc,1e-3\nd,1\n")
    assert [row["question"] for row in read(tmp_path / "rows.csv", keep={"pass_rate": (0.05, 0.6)})] == ["a", "b"]
    sentence = refused(tmp_path / "bad.csv", "question,pass_rate\na,0.1\nb,nan\n", keep={"pass_rate": (0.0, 1.0)})
    assert sentence.endswith("bad.csv' line 3 has 'nan' under 'pass_rate' (keep); it must be a number")


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", '\n{"a": 1}\n\n{"a": 2}\n', [2, 4]),
        ("a.json", '[\n{"a": 1}\n,\n\n{"a":\n2}, {"a": 3}]', [2, 5, 6]),
        ("a.json", '{"v": [1,\n2],\n "data": [{"a": 1},\n{"a": 2}]}', [3, 4]),
        ("a.csv", 'a,b\n1,"x\ny\n"\n\n2,z\n3,"\n"\n', [2, 6, 7]),
        ("a.tsv", "a\tb\n1\tx\n", [2]),
    ],
)
def test_a_row_is_named_by_the_line_that_it_begins_on(
    name: str, content: str, lines: list[int], packing: str, tmp_path: Path
) -> None:
    file = tmp_path / f"{name}{packing}"
    file.write_bytes(packed(content.encode(), packing))
    source = SourceConfig(path=str(file))
    places = [str(RowPlace(Origin("data.train", source), number)) for number in range(len(lines))]
    assert places == [f"data.train ('{file}') line {line}" for line in lines]
    assert str(RowPlace(Origin("", source), len(lines))) == f"'{file}' row {len(lines)} (counted from 0)"


def test_a_folder_gives_the_rows_of_its_shards_in_the_order_of_their_names(tmp_path: Path) -> None:
    for ending in KINDS:
        folder = tmp_path / ending
        folder.mkdir()
        (folder / f"part-1.{ending}.gz").write_bytes(packed(written(ROWS[200:], ending), ".gz"))
        (folder / f"part-0.{ending}").write_bytes(written(ROWS[:200], ending))
        for ignored in ("README.md", "_SUCCESS", ".part-0.crc"):
            (folder / ignored).write_text("no rows")
        assert read(folder) == ROWS
        kind = SourceConfig(path=f"x.{ending}").source
        assert load_rows(SourceConfig(source=kind, path=str(folder))) == ROWS
    place = RowPlace(Origin("", SourceConfig(path=str(tmp_path / "ndjson"))), 201)
    assert str(place) == f"'{tmp_path}/ndjson' line 2 of 'part-1.ndjson.gz'"


def test_a_folder_with_splits_or_kinds_of_files_is_read_where_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.csv").write_text("a\n1\n")
    (tmp_path / "test.csv").write_text("a\n2\n")
    with pytest.raises(DataError, match=r"has the splits test, train; set split to one of them"):
        read(tmp_path)
    assert read(tmp_path, split="train") == [{"a": "1"}]
    assert read(tmp_path, split="test") == [{"a": "2"}]
    (tmp_path / "train" / "0.jsonl").write_text('{"a": 3}')
    with pytest.raises(DataError, match=r"holds files of several kinds \(csv, jsonl\); set source to one of them"):
        read(tmp_path / "train")
    assert load_rows(SourceConfig(source="jsonl", path=str(tmp_path / "train"))) == [{"a": 3}]
    with pytest.raises(DataError, match=r"train' holds no files of rows that a tsv source reads .*; it has 0\.csv, 0\.jsonl"):
        load_rows(SourceConfig(source="tsv", path=str(tmp_path / "train")))


def test_a_file_of_descriptions_beside_rows_is_no_rows(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / "rows.csv").write_text("a\n1\n")
    assert read(tmp_path) == [{"a": "1"}]


GZIPPED = gzip.compress(b"{}", mtime=0)
"""Without the time, which would be in the name of a test."""


@pytest.mark.parametrize(
    ("name", "content", "end"),
    [
        ("a.json", '[{"a": 1}, 7]',
         "' element 1 (counted from 0) is a JSON number, but every element must be an object (line 1)"),
        ("a.json", '[{"a": 1},\n{"a": }]', "' line 2 is not valid JSON: Expecting value"),
        ("a.json", '[{"a": 1}\n{"a": 2}]', "' line 2 is not valid JSON: '{' stands where ',' must be"),
        ("a.json", '[{"a": 1},\n', "' line 2 is not valid JSON: Expecting value"),
        ("a.json", '[{"a": 1}', "' line 1 is not valid JSON: the end of the file stands where ',' must be"),
        ("a.json", '[{"a": 1},]', "' line 1 is not valid JSON: a value must follow the comma before ']'"),
        ("a.json", '[{"a": 1}]\n{"a": 2}',
         "' line 2 goes on behind the end of the JSON value; the file must be a list of objects, "
         '{"data": [...]}, or one object per line'),
        ("a.json", b'[{"a": 1},\n{"a": "\xff"}]', "' line 2 is not valid UTF-8: invalid start byte"),
        ("a.json", '{"0":\n {"a": 1}}', "' is one JSON object without a list under 'data'; it must be a list of objects, "
         '{"data": [...]}, or one object per line'),
        ("a.json", "[]", "' holds no rows; it needs at least one"),
        ("a.json", "[" * 100_000, "' line 1 is not valid JSON: maximum recursion depth exceeded while decoding a JSON array "
         "from a unicode string"),
        ("a.jsonl", '[{"a": 1}]',
         "' line 1 is a JSON array, but every line must be an object; a file of one array must end in .json"),
        ("a.csv", 'a,b\n1,2\n1,"2\n3,4\n', "' line 3 is not valid CSV: a double quote opens a cell here that nothing closes"),
        ("a.csv", "a,b\n1,2,3\n", "' line 2 has 3 cells, but the first line names 2 keys (a, b); a cell with a comma or a line "
         "break must stand in double quotes"),
        ("a.tsv", "a\tb\n1\n", "' line 2 has 1 cells, but the first line names 2 keys (a, b); a cell with a tab or a line "
         "break must stand in double quotes"),
        ("a.csv", 'a,b\n1,"2"3\n', "' line 2 is not valid CSV: ',' expected after '\"' (inside a quoted cell a double quote is "
         "written twice)"),
        ("a.csv", "a;b\n1;2\n", "' line 1 has ';' and no comma between the names of keys; cells must be separated by a comma"),
        ("a.csv", "a,b,a\n", "' line 1 names the key 'a' twice; every key must have a name of its own"),
        ("a.csv", "a,b\n", "' holds no rows; it needs at least one"),
        ("a.csv", b"a\nx\n\xff\n", "' line 3 is not valid UTF-8: invalid start byte"),
        ("a.txt", "a",
         "' is a file whose ending tells no kind of rows; it must end in .jsonl, .ndjson, .json, .csv, .tsv, .parquet, "
         "alone or with .gz or .zst behind it, or source must say the kind (jsonl, csv, tsv or parquet)"),
        ("a.jsonl.xz", b"\xfd7zXZ",
         "' is a file whose ending tells no kind of rows; it must end in .jsonl, .ndjson, .json, .csv, "
         ".tsv, .parquet, alone or with .gz or .zst behind it, or source must say the kind (jsonl, csv, tsv or parquet)"),
        ("a.jsonl", GZIPPED, "' line 1 is not valid UTF-8: invalid start byte; it begins as gzip data, whose name "
         "must end in .gz"),
        ("a.csv", "\ufeffa,b\n1,2\n".encode("utf-16"),
         "' line 1 is not valid UTF-8: invalid start byte; it begins as UTF-16 text, "
         "which must be saved as UTF-8"),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\n",
         "' line 1 is not valid JSON: Expecting value: line 1 column 1 "
         "(char 0); it begins as a pointer of Git LFS in place of the file; get it with git lfs pull"),
        ("a.jsonl.gz", '{"a": 1}\n', "' is not gzip data, as its name says; it must be, or end otherwise (Not a gzipped file "
         "(b'{\"'))"),
        ("a.jsonl.zst", '{"a": 1}\n',
         "' is not Zstandard data, as its name says; it must be, or end otherwise (ZSTD decompress "
         "failed: Unknown frame descriptor)"),
        ("a.parquet.gz", "x", "' is not gzip data, as its name says; it must be, or end otherwise (Not a gzipped file (b'x'))"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_sentence(name: str, content: bytes | str, end: str, tmp_path: Path) -> None:
    assert refused(tmp_path / name, content) == f"'{tmp_path / name}" + end


def test_a_file_of_another_kind_than_its_source_says_is_named_with_its_own(tmp_path: Path) -> None:
    sentence = refused(tmp_path / "a.csv", "question,answer\n1,2\n", source="jsonl")
    assert sentence == (
        f"'{tmp_path}/a.csv' line 1 is not valid JSON: Expecting value: line 1 column 1 (char 0); by its ending it is csv: "
        "remove source: jsonl, or set it to csv"
    )
    assert "it begins as a Parquet file" in refused(tmp_path / "a.jsonl", written(ROWS, "parquet"))
    assert "remove source: parquet, or set it to csv" in refused(tmp_path / "a.csv", "a\n1\n", source="parquet")
    (tmp_path / "rows.txt").write_text("a\n1\n")
    assert load_rows(SourceConfig(source="csv", path=str(tmp_path / "rows.txt"))) == [{"a": "1"}]


@pytest.mark.parametrize(("packing", "named"), [(".gz", "gzip"), (".zst", "Zstandard")])
def test_a_compressed_file_that_is_cut_off_or_damaged_is_named_with_the_row(packing: str, named: str, tmp_path: Path) -> None:
    random = Random(0)
    rows = [{"a": random.randbytes(5000).hex()} for _ in range(400)]
    whole = packed(written(rows, "jsonl"), packing)
    sentence = refused(tmp_path / f"a.jsonl{packing}", whole[: len(whole) // 2])
    prefix = f"'{tmp_path}/a.jsonl{packing}' is cut off: its {named} data end in the middle, behind row "
    assert sentence.startswith(prefix)
    assert sentence.endswith("; it must be complete")
    assert 100 < int(sentence.removeprefix(prefix).split(";")[0]) < 250
    damaged = whole[: len(whole) // 2] + bytes(1000) + whole[len(whole) // 2 + 1000 :]
    assert refused(tmp_path / f"a.jsonl{packing}", damaged).startswith(f"'{tmp_path}/a.jsonl{packing}' ")


def test_text_without_end_is_refused_before_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that unpacks to a line without end; the bounds are made small here."""
    for module in (row_lines, json_rows):
        monkeypatch.setattr(module, "LONGEST_ROW", 1 << 21)
    bomb = gzip.compress(b'{"a": "' + b"x" * (1 << 26))
    assert refused(tmp_path / "a.jsonl.gz", bomb).endswith("line 1 is longer than 2 MB; a row may be at most that")
    assert refused(tmp_path / "a.csv.gz", bomb).endswith("line 1 is longer than 2 MB; a row may be at most that")
    listed = gzip.compress(b'[{"a": "' + b"x" * (1 << 26))
    assert refused(tmp_path / "a.json.gz", listed).endswith(
        "line 1 begins a value of more than 2 MB; a row may be at most that"
    )
    monkeypatch.setattr(row_files, "MOST_UNPACKED", 1 << 20)
    assert "holds more than " in refused(tmp_path / "a.parquet.gz", gzip.compress(bytes(1 << 26)))


def test_a_list_is_read_element_by_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows of a list whose end is damaged are given before the damage is seen."""
    monkeypatch.setattr(json_rows, "BLOCK", 1000)
    (tmp_path / "a.json").write_text(json.dumps(NESTED)[:-1] + "oops")
    assert read(tmp_path / "a.json", limit=200) == NESTED[:200]
    with pytest.raises(DataError, match=r"line 1 is not valid JSON: 'o' stands where ',' must be"):
        read(tmp_path / "a.json")


def test_random_bytes_never_give_a_traceback(tmp_path: Path) -> None:
    random = Random(0)
    for ending in KINDS:
        for packing in ("", ".gz", ".zst"):
            for number in range(20):
                content = random.randbytes(random.randint(1, 200)) + b"\xff"
                file = tmp_path / f"{number}.{ending}{packing}"
                assert str(file) in refused(file, packed(content, packing if number % 2 else ""))
