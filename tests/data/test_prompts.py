"""Prompt sources: the same rows every time, and one sentence for everything that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.parquet
import pytest

from megarl.config.sources import SourceConfig
from megarl.data.prompts import load_rows
from megarl.errors import DataError


def _python_source(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, name: str = "f") -> SourceConfig:
    module = f"rows_{abs(hash(body))}"
    (folder / f"{module}.py").write_text(body)
    monkeypatch.syspath_prepend(folder)
    return SourceConfig(source="python", name=f"{module}:{name}", args={"n": 3})


def test_jsonl_rows_are_the_objects_in_the_file_and_limit_takes_the_first(tmp_path: Path) -> None:
    rows = [{"question": f"q{i} – ü", "answer": i, "nested": {"a": [i]}} for i in range(5)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    assert load_rows(SourceConfig(source="jsonl", path=str(file))) == rows
    assert load_rows(SourceConfig(source="jsonl", path=str(file), limit=2)) == rows[:2]


def test_parquet_rows_are_the_rows_of_the_table(tmp_path: Path) -> None:
    rows = [{"question": [{"role": "user", "content": f"q{i}"}], "answer": str(i)} for i in range(3000)]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert load_rows(SourceConfig(source="parquet", path=str(file))) == rows
    assert load_rows(SourceConfig(source="parquet", path=str(file), limit=1500)) == rows[:1500]


def test_python_source_is_called_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _python_source(tmp_path, monkeypatch, "def f(n):\n    for i in range(n): yield {'question': str(i)}\n")
    assert load_rows(source) == [{"question": "0"}, {"question": "1"}, {"question": "2"}]


def test_procedural_row_depends_on_seed_plus_index_alone() -> None:
    args = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = load_rows(SourceConfig(name="chain_sum", args=args, limit=20, seed=100))
    shifted = load_rows(SourceConfig(name="chain_sum", args=args, limit=5, seed=110))
    assert rows[10:15] == shifted
    assert len({row["question"] for row in rows}) > 10
    for row in rows:  # the answers are what Python says
        assert int(row["answer"]) == eval(row["metadata"]["expression"])  # noqa: S307
        assert row["data_source"] == "chain_sum"


def test_procedural_source_without_limit_makes_1000_rows() -> None:
    assert len(load_rows(SourceConfig(name="chain_sum"))) == 1000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"a": 1}\n{"a": \n', "rows.jsonl' line 2 is not valid JSON"),
        ('{"a": 1}\n\n[1]\n', "rows.jsonl' line 3 is a JSON array, but every line must be an object"),
        ("null\n", "line 1 is a JSON null"),
        ("", "holds no rows"),
        ("\n \n", "holds no rows"),
        (b'{"a": "\xff"}\n', "line 1 is not valid UTF-8"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path: Path, content: str | bytes, sentence: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=sentence):
        load_rows(SourceConfig(source="jsonl", path=str(file)))


def test_random_bytes_never_give_a_traceback(tmp_path: Path) -> None:
    random = Random(0)
    for kind in ("jsonl", "parquet"):
        for number in range(50):
            file = tmp_path / f"{number}.{kind}"
            file.write_bytes(random.randbytes(random.randint(0, 200)))
            with pytest.raises(DataError, match=str(file)):
                load_rows(SourceConfig(source=kind, path=str(file)))


def test_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"trian\.jsonl' is no file \(did you mean '.*train\.jsonl'\?\)"):
        load_rows(SourceConfig(source="jsonl", path=str(tmp_path / "trian.jsonl")))


def test_unknown_task_and_argument_name_the_nearest() -> None:
    with pytest.raises(DataError, match="no task 'chain_summ' \\(did you mean 'chain_sum'\\?\\)"):
        load_rows(SourceConfig(name="chain_summ"))
    with pytest.raises(DataError, match="no argument 'min_term' \\(did you mean 'min_terms'\\?\\)"):
        load_rows(SourceConfig(name="chain_sum", args={"min_term": 2}))
    with pytest.raises(DataError, match="no argument 'seed'"):
        load_rows(SourceConfig(name="chain_sum", args={"seed": 2}))
    with pytest.raises(DataError, match=r"chain_sum.*could not make row 0: AssertionError"):
        load_rows(SourceConfig(name="chain_sum", args={"min_terms": -1}))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def f(n): raise KeyError('x')\n", r"raised KeyError: 'x' \(.*line 1\)"),
        ("def f(n):\n    yield {}\n    1 / 0\n", r"raised ZeroDivisionError.*line 3"),
        ("def f(n): return [{}, 7]\n", "row 1 is a int; it must be a dict"),
        ("def f(n): return {'question': 1}\n", "returned a dict; it must return a list of dicts"),
        ("def f(n): return None\n", "returned a NoneType"),
        ("def f(n): return []\n", "holds no rows"),
        ("def f(): return [{}]\n", "raised TypeError"),
        ("def g(n): return [{}]\n", "has no function 'f'"),
        ("import no_such_module_anywhere\n", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_bad_python_source_is_named_with_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        load_rows(_python_source(tmp_path, monkeypatch, body))
