"""Every line of docs/evidence/bugs_that_cannot_happen.md has a thread, a mechanism in the code, and tests that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "evidence/bugs_that_cannot_happen.md"
THREAD = re.compile(r"\[([\w-]+)#(\d+)\]\(https://github\.com/[\w-]+/([\w-]+)/(?:issues|pull)/(\d+)\)")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CODE = re.compile(r"`((?!tests/)[\w/]+\.py)`")


@cache
def defined(path: Path) -> frozenset[str]:
    """The test functions that a file defines, at its top or in its classes."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    places = [tree := ast.parse(path.read_text()), *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    return frozenset(node.name for place in places for node in place.body if isinstance(node, functions))


def lines(text: str) -> list[list[str]]:
    """The cells of the tables' lines: thread, what goes wrong, why not here, tests."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [cells for cells in rows if cells[0] != "reported" and not cells[0].startswith("---")]


def wrong_names(text: str) -> Iterator[str]:
    """The tests and files of megarl that `text` names and that there are not."""
    for name, function in TEST.findall(text):
        if not (ROOT / name).is_file():
            yield f"{name}: there is no such file"
        elif not function.startswith("test_") or function not in defined(ROOT / name):
            yield f"{name}::{function}: there is no such test"
    for name in CODE.findall(text):
        if not (ROOT / "megarl" / name).is_file():
            yield f"megarl/{name}: there is no such file"


def wrong_cells(cells: list[str]) -> Iterator[str]:
    """What a line of a table lacks."""
    if len(cells) != 4:
        yield f"{cells[0]}: {len(cells)} cells; there must be 4"
        return
    threads = THREAD.findall(cells[0])
    if not threads or THREAD.sub("", cells[0]).strip(", "):
        yield f"{cells[0]}: the first cell must be links to threads"
    yield from (f"{cells[0]}: #{said} leads to {linked}" for _, said, _, linked in threads if said != linked)
    if not cells[1].endswith(".") or not cells[2].endswith("."):
        yield f"{cells[0]}: cells 2 and 3 must be sentences"
    if not TEST.findall(cells[3]) or TEST.sub("", cells[3]).replace("<br>", ""):
        yield f"{cells[0]}: the last cell must be tests"


def test_what_a_line_lacks_is_found() -> None:
    here, this = "tests/docs/test_bugs_page.py", "test_what_a_line_lacks_is_found"
    link = "[verl#7](https://github.com/verl-project/verl/issues/7)"
    good = f"| {link} | It hangs. | A deadline (`workers/group.py`). | `{here}::{this}` |"
    assert [[*wrong_cells(cells)] for cells in lines(f"| reported | a | b | test |\n|---|---|---|---|\n{good}")] == [[]]
    assert [*wrong_names(good)] == []
    assert [*wrong_names(f"`{here}::test_that_is_not` `{here}::lines.py` `tests/docs/none.py::{this}` `workers/none.py`")] == [
        f"{here}::test_that_is_not: there is no such test",
        "tests/docs/none.py: there is no such file",
        "megarl/workers/none.py: there is no such file",
    ]
    assert [*wrong_names(f"`{here}::lines`")] == [f"{here}::lines: there is no such test"]
    for bad in (good.replace("issues/7", "issues/8"), good.replace(link, "verl"), good.replace("It hangs.", "It hangs"),
                good.replace(f"`{here}::{this}`", "a test"), good.replace(" | It hangs.", "")):  # fmt: skip
        [cells] = lines(bad)
        assert len([*wrong_cells(cells)]) == 1, bad


def test_every_line_has_a_thread_a_reason_and_tests() -> None:
    found = lines(PAGE.read_text())
    assert len(found) >= 25
    assert [problem for cells in found for problem in wrong_cells(cells)] == []


def test_every_test_and_every_file_that_it_names_is_there() -> None:
    assert [*wrong_names(PAGE.read_text())] == []


@pytest.mark.parametrize("kind", ["skip", "xfail"])
def test_no_test_that_it_names_is_left_out(kind: str) -> None:
    """A test that is skipped or expected to fail on every machine shows nothing."""
    left_out = []
    for name, function in sorted(set(TEST.findall(PAGE.read_text()))):
        for node in ast.parse((ROOT / name).read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
                left_out += [
                    f"{name}::{function}" for mark in node.decorator_list if ast.unparse(mark).startswith(f"pytest.mark.{kind}")
                ]
    assert left_out == []
