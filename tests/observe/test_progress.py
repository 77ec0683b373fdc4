"""Progress: one line per step, a live view below it where there is a terminal, and the phase table at the end."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest
from rich.console import Console

from megarl.observe import Phases, Progress
from megarl.observe.progress import duration, rows_line


class Clock:
    """A clock that moves only when told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run_two_steps(console: Console) -> str:
    clock = Clock()
    phases = Phases(clock)
    with Progress(5, phases, console=console) as progress:
        for step in (1, 2):
            with phases.step():
                with phases("generate"):
                    clock.now_s += 3
                with phases("train"):
                    clock.now_s += 1
            progress.step_done(step, {"reward/mean": 0.125 * step, "speed/tokens_per_s": 1234.0, "other": 9})
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_say_reward_speed_time_and_where_it_went() -> None:
    text = run_two_steps(Console(file=io.StringIO(), width=200))
    lines = text.splitlines()
    assert lines[0].startswith("step 1/5  reward 0.125  tokens/s 1,234  4.0 s  left ")
    assert lines[1].startswith("step 2/5  reward 0.25")
    assert "(generate 75%, train 25%, other 0%)" in lines[1]
    assert "\x1b" not in text


def test_a_run_says_how_many_rows_of_every_kind_it_has() -> None:
    assert rows_line(7, None, None, {}) == "7 training rows"
    assert rows_line(7, 2, None, {}) == "7 training rows, 2 held-out rows"
    sets = {"digits": 6, "sums": 5}
    assert rows_line(7, 200, 200, sets) == (
        "7 training rows, 200 held-out rows (data.eval.limit is 200), evaluations: digits 6, sums 5"
    )


def test_the_parts_of_a_phase_are_told_with_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("megarl.observe.progress.time.monotonic", lambda: now_s)
    console = Console(file=io.StringIO(), width=200)
    progress = Progress(5, Phases(Clock()), console=console)
    for what, spent in (("Ray", 6.125), ("policy", 30.0), ("reference", 0.04), ("engines", 4.0)):
        progress.doing(what)
        now_s += spent
    progress.say_parts("started")
    progress.say_parts("started")  # nothing since
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "started: Ray 6.1 s, policy 30.0 s, engines 4.0 s\n"


def test_of_parts_that_are_too_many_for_a_line_the_longest_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("megarl.observe.progress.time.monotonic", lambda: now_s)
    progress = Progress(5, Phases(Clock()), console=Console(file=io.StringIO(), width=200))
    for what, spent in (("Ray", 2.6), ("ranks", 112.6), ("policy", 2.0), ("critic", 1.4), ("reference", 0.2), ("engines", 1.8)):
        progress.doing(what)
        now_s += spent
    progress.say_parts("started")
    assert isinstance(progress.console.file, io.StringIO)
    assert progress.console.file.getvalue() == "started: Ray 2.6 s, ranks 112.6 s, policy 2.0 s, critic 1.4 s, engines 1.8 s\n"


def test_the_final_table_has_every_phase() -> None:
    text = run_two_steps(Console(file=io.StringIO(), width=200))
    row = next(line for line in text.splitlines() if "generate" in line and "│" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["generate", "6.0", "3.00", "75.0%"]
    assert "other" in text


def test_a_terminal_gets_a_live_view_of_the_phase_and_how_far_it_is() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    clock, finished = Clock(), 0
    phases = Phases(clock)
    with Progress(5, phases, console=console) as progress:
        progress.within("generate", "groups", lambda: (finished, 8))
        for step in (1, 2):
            with phases.step(), phases("generate"):
                clock.now_s += 3
                finished = 3 * step
                seen = drawn(progress)
                progress.say("engine 0 was started anew")
            progress.step_done(step, {"reward/mean": 0.25, "kl/reference": 0.001, "memory/policy_peak_gib": 2.5})
        assert "generate" in seen
        assert "6/8 groups" in seen
        assert "1/5  left" in seen
        after = drawn(progress)
        assert "2/5  left" in after
        assert "groups" not in after  # no phase is on
        assert "100% of the steps' time" in after
    assert isinstance(console.file, io.StringIO)
    assert "engine 0 was started anew" in console.file.getvalue()
    assert "step 1/5  reward 0.25  KL 0.001  GiB 2.5  3.0 s\n" in console.file.getvalue()
    assert "\x1b" in console.file.getvalue()


def test_a_step_is_one_line_of_a_terminal_with_the_figures_that_it_has_room_for() -> None:
    figures = {"reward/mean": 0.78321, "kl/reference": 0.39082, "critic/explained_variance": -0.0002932}
    figures |= {
        "response/tokens_mean": 2.6412,
        "staleness/mean": 1.0,
        "speed/tokens_per_s": 12345.0,
        "memory/policy_peak_gib": 50.66,
    }
    lines = {}
    for width in (40, 80, 300):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        phases = Phases(Clock())
        with Progress(100, phases, first_step=98, console=console) as progress:
            progress.say("newest checkpoint: /a/folder/with/a/long/name/step_000001")
            with phases.step():
                pass
            progress.step_done(99, figures)
        assert isinstance(console.file, io.StringIO)
        kept = [line.rstrip() for line in without_escapes(console.file.getvalue()).splitlines()]
        (lines[width],) = (line for line in kept if line.startswith("step 99"))
        assert kept[-1].startswith("last step 99/100  reward 0.783")
        assert len(kept[-1]) <= width
        if width == 40:  # a sentence goes on below, at a word
            assert [line for line in kept if "checkpoint" in line or "step_0" in line] == [
                "newest checkpoint:",
                "/a/folder/with/a/long/name/step_000001",
            ]
    whole = "step 99/100  reward 0.783  KL 0.391  critic explains -0.000293  length 2.64  staleness 1  tokens/s 12,345"
    assert lines == {
        40: "step 99/100  reward 0.783  0.0 s",
        80: "step 99/100  reward 0.783  KL 0.391  critic explains -0.000293  GiB 50.7  0.0 s",
        300: f"{whole}  GiB 50.7  0.0 s",
    }


def test_what_a_real_terminal_keeps_has_a_line_of_every_step() -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    program = (
        "from megarl.observe import Phases, Progress\n"
        "phases = Phases()\n"
        "with Progress(2, phases) as progress:\n"
        "    with phases('start'):\n"
        "        progress.doing('ranks')\n"
        "    for step in (1, 2):\n"
        "        with phases.step(), phases('generate'):\n"
        "            pass\n"
        "        progress.step_done(step, {'reward/mean': step / 8})\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    child = subprocess.Popen([sys.executable, "-c", program], stdout=slave, stderr=slave, stdin=slave, env=environment)
    os.close(slave)
    seen = b""
    with contextlib.suppress(OSError):  # which is how the end of a terminal is told
        while part := os.read(master, 65536):
            seen += part
    os.close(master)
    assert child.wait(60) == 0
    kept = kept_by_a_terminal(seen.decode())
    assert [line.split("  ")[:2] for line in kept if line.startswith("step ")] == [
        ["step 1/2", "reward 0.125"],
        ["step 2/2", "reward 0.25"],
    ]
    assert kept[-1].startswith("last step 2/2  reward 0.25")
    assert not any("steps  " in line for line in kept)  # the view is gone


def test_where_there_is_no_terminal_a_long_evaluation_says_how_far_it_is() -> None:
    console, asked = Console(file=io.StringIO(), width=200), threading.Event()
    phases = Phases(Clock())

    def progress_of_it() -> tuple[int, int]:
        if isinstance(console.file, io.StringIO) and "evaluate: " in console.file.getvalue():
            asked.set()
        return 3, 8

    with Progress(5, phases, console=console) as progress:
        progress.told_every_s = 0.001
        progress.within("evaluate", "prompts", progress_of_it)
        progress.within("generate", "groups", lambda: (0, 0))
        with phases("generate"):
            assert progress._timer is None
        with phases("evaluate"):
            assert asked.wait(30)
        assert progress._timer is None
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("evaluate: 3/8 prompts, 0 s\n")


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text)


def kept_by_a_terminal(text: str) -> list[str]:
    """The lines that stand at the end, with cursor moves up and erased lines obeyed."""
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[[0-9]*A", piece):
            row -= int(piece[2:-1] or 1)
        elif not piece.startswith(("\x1b", "\r")):
            lines[row] += piece
    return [line.rstrip() for line in lines if line.strip()]


def drawn(progress: Progress) -> str:
    """What the view shows now."""
    console = Console(file=io.StringIO(), width=200)
    assert progress._live is not None
    console.print(progress._live.get_renderable())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (725, "12 min 05 s"), (11220, "3 h 07 min")])
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text
