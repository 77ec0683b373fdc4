"""The how-to pages work as they stand: their files are written, their commands run, and what they show is what is printed.

A block with a title is a file of that name. A `bash` block is run. A `text` block behind one shows lines of its output, in
which a number stands for any number and `…` for anything. What a plan or a placement prints is the same on every machine: there
numbers stand for themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks, missing, pages
from tests.warm_workers import WarmWorkers

MODEL = "models/tiny-arithmetic"
RUNNABLE = (
    "add_a_model.md",
    "add_a_reward.md",
    "add_an_engine.md",
    "add_an_episode.md",
    "add_an_estimator.md",
    "from_one_gpu_to_a_cluster.md",
    "own_data.md",
    "run_that_does_not_learn.md",
    "speculative.md",
)
SAME_EVERYWHERE = ("megarl plan ", "megarl rehearse eight.yaml --placement-only ")
IN_EVERY_RUN = ("add_a_reward.md", "from_one_gpu_to_a_cluster.md", "own_data.md")
"""The pages that `make test` runs. The others train up to three times, each for one thing that smaller tests have: own_data.md
stands for pages that train. After a change to one of them: `python -m pytest tests/docs -m "" -k add_an_engine`."""


def test_a_line_that_was_not_printed_is_found() -> None:
    printed = "step 1/6  reward 0.6133  tokens/s 1,299  (update 56%)\nheld-out accuracy: 35.0% before"
    assert missing("step 3/6  reward 0.1 …\nheld-out accuracy: 1% before", printed, numbers=True) == []
    assert missing("step 1/6  rewards 0.6133\nheld-out …", printed, numbers=True) == ["step 1/6  rewards 0.6133"]
    assert missing("step 1/6  reward 0.6134 …\n… 35.0% before", printed, numbers=False) == ["step 1/6  reward 0.6134 …"]


def test_every_page_with_files_of_its_own_is_run() -> None:
    assert {page.name for page in pages() if any(block.title for block in blocks(page))} == set(RUNNABLE)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a page trains up to three times, each mostly the start of processes
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in RUNNABLE]
)
def test_the_page_runs_as_it_stands(name: str, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    if not (ROOT / MODEL / "config.json").is_file():
        pytest.skip(f"needs {MODEL} (make tiny-model)")
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = tmp_path / "bin"  # `megarl` and `python` are those of this interpreter, and megarl that of this checkout
    programs.mkdir()
    (programs / "megarl").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m megarl "$@"\n')
    (programs / "megarl").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | warm_workers.environment
    printed, numbers = "", True
    for block in blocks(DOCS / name):
        if block.title:
            (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            printed = done.stdout + done.stderr
            numbers = not block.text.startswith(SAME_EVERYWHERE)
            assert done.returncode == 0, f"{block.text}\n{printed[-4000:]}"
        elif block.language == "text" and printed:
            assert missing(block.text, printed, numbers=numbers) == [], printed[-4000:]
