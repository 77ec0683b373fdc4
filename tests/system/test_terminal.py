"""A program goes on when nobody reads what it prints any more: a pipe's reader left, or its terminal was closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
from rich.console import Console
from megarl.system.terminal import outlive_readers
if sys.argv[2] == "endures":
    outlive_readers()
console = Console()
print("ready", flush=True)
sys.stdin.readline()
for number in range(2000):
    console.print(f"line {number} " + "." * 80)
if os.fork() == 0:
    print("a child prints", flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print("stderr, too", file=sys.stderr)
Path(sys.argv[1]).write_text("done")
"""


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
@pytest.mark.parametrize("endures", [True, False])
def test_it_does_its_work_to_the_end(tmp_path: Path, kind: str, endures: bool) -> None:
    ours, theirs = os.openpty() if kind == "terminal" else os.pipe()
    arguments = [str(tmp_path / "done"), "endures" if endures else "plain"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    assert os.read(ours, 5) == b"ready"
    os.close(ours)
    program.communicate(b"\n", timeout=60)
    assert (tmp_path / "done").exists() == endures
    assert (program.returncode == 0) == endures


def test_other_failures_are_still_raised() -> None:
    program = "import sys\nfrom megarl.system.terminal import outlive_readers\noutlive_readers()\nprint('x', flush=True)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
