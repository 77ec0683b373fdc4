"""Work of others in the repository is listed with its licence, and so are the licences of what is installed."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.supply.scripts import ROOT, script

third_party = script("third_party")
if not (ROOT / ".git").exists():
    pytest.skip("needs git's list of files", allow_module_level=True)

OWN_WORDS = ("tools/supply/*", "tests/supply/*", "THIRD_PARTY.md")
"""They name the notices that they look for."""


@pytest.fixture(scope="module")
def files() -> list[str]:
    found = third_party.tracked()
    assert len(found) > 1000
    return found


def test_what_looks_like_work_of_others_is_listed(files: list[str]) -> None:
    patterns = [row.path for row in third_party.rows()]
    reasons = {
        name: third_party.foreign(name)
        for name in files
        if not any(fnmatch(name, pattern) for pattern in (*patterns, *OWN_WORDS))
    }
    assert {name: reason for name, reason in reasons.items() if reason} == {}


def test_every_row_names_files_and_what_it_must_say(files: list[str]) -> None:
    rows = third_party.rows()
    assert len(rows) > 10
    for row in rows:
        matched = [name for name in files if fnmatch(name, row.path)]
        assert matched, row
        assert row.licence, row
        assert row.source, row
        if not row.path.endswith(".py"):
            assert row.shipped == all(name.startswith("megarl/") for name in matched), row
    assert [pattern for pattern in third_party.OWN_DATA if not any(fnmatch(name, pattern) for name in files)] == []
    uplot = (ROOT / "megarl/observe/page/vendor/uplot.js").read_text()[:200]
    assert f"uPlot {re.search(r'v([0-9.]+)', uplot)[1]}," in rows[0].source


def test_the_schemas_and_model_configs_are_those_that_their_own_pages_list(files: list[str]) -> None:
    listed = {row.path for row in third_party.rows()}
    page = (ROOT / "tests/launch/schemas/README.md").read_text()
    assert {f"tests/launch/schemas/{name}" for name in re.findall(r"^\| `([\w.-]+\.json)`", page, re.M)} <= listed
    advisories = (ROOT / "requirements/advisories.jsonl").open().readline()
    assert '"licence":"CC-BY-4.0"' in advisories


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("megarl/words.txt", "a\nb\n", "it is data of which"),
        ("tests/rewards/problems.jsonl", "{}\n", "it is data of which"),
        ("megarl/observe/page/font.woff2", "x", "it is data of which"),
        ("megarl/observe/page/chart.js", "// Copyright (c) 2020 Somebody\n", "it says 'Copyright (c) 2020'"),
        ("megarl/observe/page/chart.min.js", "/*! Chart v1 */\n", "it says '/*!'"),
        ("megarl/observe/page/chart.css", ".a{}" * 300, "a line has more than 1000"),
        ("megarl/vendor/part.yaml", "a: 1\n", "it lies in a folder"),
        ("tests/data/more.py", '"""Chat templates of families as they are published."""\n', "it says 'templates of families"),
        ("megarl/maths/part.py", "# adapted from https://example.org/part.py\n", "it says 'adapted from https:'"),
        ("megarl/maths/part.py", "# SPDX-License-Identifier: MIT\n", "it says 'SPDX-License-Identifier'"),
        ("megarl/maths/part.py", "# tensors copied from main memory\n", None),
        ("examples/new/run.yaml", "a: 1\n", None),
    ],
)
def test_a_file_of_somebody_else_is_noticed(tmp_path: Path, name: str, content: str, reason: str | None) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "--all"], check=True)
    assert third_party.tracked(tmp_path) == [name]
    found = third_party.foreign(name, tmp_path)
    assert found is None if reason is None else (found or "").startswith(reason)
