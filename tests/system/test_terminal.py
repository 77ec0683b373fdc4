"""What is printed steers no terminal, and a program goes on when nobody reads it any more: a reader left, a terminal closed."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from tqdm import tqdm

from megarl.errors import written_out
from megarl.system.terminal import SafeStream

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


POISON = "\x1b]0;taken over\x07\x1b[2J\x9b2J\x85\r\u202eneddih\u2066\u200f\U000e0041\ud800\x00"


def control_characters(text: str) -> list[str]:
    return [
        character for character in text if unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in "\n\t"
    ]


def test_text_that_is_written_out_has_no_control_characters_and_else_is_as_it_was() -> None:
    assert control_characters(POISON), "the rule sees them"
    assert control_characters(written_out(POISON)) == []
    assert written_out("\x1b\u202e\x85\r") == "\\x1b\\u202e\\x85\\r"
    ordinary = "π ≤ 4\u00a0km,\u3000日本\n\t👩\u200d👩 می\u200cخواهم\r\n"
    assert written_out(ordinary) == ordinary.replace("\r\n", "\n")


PRINTING = """
import logging, sys, warnings
from rich.table import Table
from rich.text import Text
from megarl.system.safe_console import SafeConsole
from megarl.system.terminal import print_safely
poison = POISON
print_safely()
print(poison)
sys.stdout.writelines([poison])
logging.getLogger("a").warning("%s", poison)
warnings.warn(poison)
console = SafeConsole(force_terminal=True, width=300)
console.print(poison, style="bold")
table = Table("a" + poison)
table.add_row(Text(poison), poison)
console.print(table)
with console.status("working"):
    print("below", poison)
print("\\x1b[31mred\\x1b[0m")
raise ValueError(poison)
"""


def test_nothing_that_is_printed_logged_or_raised_steers_a_terminal() -> None:
    program = PRINTING.replace("POISON", ascii(POISON))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment)
    output, errors = done.stdout.decode(), done.stderr.decode()
    assert control_characters(errors) == []
    assert errors.count("neddih") == 3, "logged, warned, and in the traceback"
    assert "ValueError: \\x1b]0;taken over\\x07" in errors
    own = re.sub(r"\x1b\[[0-9;?]*[mAKhl]|\r", "", output)  # colours and moves of rich
    assert control_characters(own) == []
    assert own.count("neddih") == 7
    assert "\x1b[31m" not in output
    assert "red\n" in output
    assert "\x1b[1m" in output, "a console of ours has its colours"


def test_bars_of_other_libraries_still_move() -> None:
    stream = io.StringIO()
    with tqdm(total=2, file=SafeStream(stream), desc="down\x1b[2J", ascii=True) as bar:
        bar.update(2)
    assert stream.getvalue().startswith("\rdown\\x1b[2J:   0%")
    assert set(control_characters(stream.getvalue())) == {"\r"}


def test_every_console_of_megarl_is_a_safe_one() -> None:
    calls = []
    for file in (Path(__file__).parents[2] / "megarl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Console":
                calls.append(f"{file.name}:{node.lineno}")
    assert calls == []
