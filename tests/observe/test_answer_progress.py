"""Progress of evaluations and `megarl generate`: a bar on a terminal, lines elsewhere, never both."""

from __future__ import annotations

import io
import threading

from rich.console import Console

from megarl.observe.answer_progress import answers_shown


def test_elsewhere_than_on_a_terminal_a_line_now_and_then_says_how_many_prompts_are_answered() -> None:
    said: list[str] = []
    states = iter([(0, 0), (3, 12), (12, 12)])
    all_said = threading.Event()

    def tell(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            all_said.set()

    with answers_shown(lambda: next(states, (12, 12)), tell, Console(file=io.StringIO()), every_s=0.001):
        assert all_said.wait(30)
    assert said[:3] == ["starting", "3 of 12 prompts answered", "judging"]


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    looked = threading.Event()
    looks = 0

    def answered() -> tuple[int, int]:
        nonlocal looks
        looks += 1
        if looks > 3:
            looked.set()
        return 5, 12

    def tell(line: str) -> None:
        raise AssertionError(line)

    with answers_shown(answered, tell, console):
        assert looked.wait(30)
    assert isinstance(console.file, io.StringIO)
    seen = console.file.getvalue()
    assert "prompts answered" in seen
    assert "5/12" in seen
    assert seen.endswith("\x1b[2K")  # the bar's line is erased
