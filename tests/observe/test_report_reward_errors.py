"""The report says of every source of reward that failed how often, when, and with which traceback first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.observe.report import build_page, page_data
from megarl.observe.run_record import read_run
from tests.observe.chromium import BINARY, Chromium
from tests.observe.recorded import HARM, write_run

ROWS = [
    {
        "step": 2,
        "reward": "judge",
        "on_error": "drop_group",
        "while": "step",
        "errors": 3,
        "error": HARM,
        "traceback": f"T {HARM}",
    },
    {"step": 2, "reward": "http", "on_error": "zero", "while": "step", "errors": 1, "error": "no answer", "traceback": "U"},
    {"step": 4, "reward": "judge", "on_error": "zero", "while": "evaluation", "errors": 2, "error": "late"},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "a")
    (folder / "reward_errors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_failures_are_added_up_by_source(run: Path) -> None:
    [told] = [one["reward_errors"] for one in page_data([read_run(run)])["runs"]]
    assert told == [
        {
            "reward": "judge", "errors": 5, "steps": 2, "first step": 2, "last step": 4, "on_error": "drop_group, zero",
            "error": HARM, "traceback": f"T {HARM}",
        },
        {
            "reward": "http", "errors": 1, "steps": 1, "first step": 2, "last step": 2, "on_error": "zero",
            "error": "no answer", "traceback": "U",
        },
    ]  # fmt: skip


@pytest.fixture
def page(run: Path) -> Path:
    (run / "report.html").write_text(build_page([read_run(run)]))
    return run / "report.html"


@pytest.mark.skipif(BINARY is None, reason="needs Chromium (apt-get install chromium)")
def test_the_page_has_a_section_of_them_in_which_no_text_of_a_run_becomes_markup(opened: Chromium) -> None:
    cells = opened.run("[...document.querySelectorAll('#reward-errors td')].map((node) => node.textContent)")
    assert cells == ["judge", "5", "2", "2", "4", "drop_group, zero", HARM, "http", "1", "1", "2", "2", "zero", "no answer"]
    assert opened.run("[...document.querySelectorAll('#reward-errors pre')].map((node) => node.textContent)") == [
        f"T {HARM}",
        "U",
    ]
    assert opened.run("document.title") == "megarl: a"
    assert opened.run("document.images.length") == 0
