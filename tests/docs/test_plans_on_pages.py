"""What pages show of `megarl plan` is what it prints, figure by figure: a plan is the same on every machine.

A block that begins with `$ megarl plan` is run from the repository's root; every line behind the command is a line of what was
printed, in which `…` stands for anything. Pages that are run as they stand (`test_pages_run.py`) have theirs held there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.docs.pages import DOCS, ROOT, blocks, missing

PLAN = "$ megarl plan "
OWN_CONFIG = "run.yaml"
"""A config of that name is a reader's own, which only the page's text describes."""


def shown_plans() -> list[tuple[str, str, str]]:
    """Each shown plan: its page, its arguments and the lines that are shown."""
    shown = []
    for page in sorted(DOCS.glob("*.md")):
        for block in blocks(page):
            command, _, lines = block.text.partition("\n")
            if command.startswith(PLAN) and OWN_CONFIG not in command:
                shown.append((page.name, command.removeprefix(PLAN), lines))
    return shown


@pytest.mark.parametrize(("page", "arguments", "lines"), shown_plans())
def test_a_shown_plan_is_what_is_printed(page: str, arguments: str, lines: str) -> None:
    command = [sys.executable, "-P", "-m", "megarl", "plan", *shlex.split(arguments)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    assert missing(lines, printed, numbers=False) == [], f"docs/{page}: {arguments}\n{printed[-4000:]}"
