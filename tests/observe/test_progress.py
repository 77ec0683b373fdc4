"""Progress: one plain line per step where there is no terminal, a live view where there is, and the phase table at the end."""

from __future__ import annotations

import io

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
    for what, spent in (("Ray", 6.125), ("policy", 30.0), ("engines", 4.0)):
        progress.doing(what)
        now_s += spent
    progress.say_parts("started")
    progress.say_parts("started")  # nothing since
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "started: Ray 6.1 s, policy 30.0 s, engines 4.0 s\n"


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
        assert "step 1: reward 0.25 · KL 0.001 · GiB 2.5 · 3.0 s" in seen
        after = drawn(progress)
        assert "2/5  left" in after
        assert "groups" not in after  # no phase is on
        assert "100% of the steps' time" in after
    assert isinstance(console.file, io.StringIO)
    assert "engine 0 was started anew" in console.file.getvalue()
    assert "\x1b" in console.file.getvalue()


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
