"""Display for the user while prompts are answered outside a run: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megarl.system.threads import repeating

THREAD = "progress of answers"
TELL_S = 10.0
"""Seconds between two lines."""
DRAW_S = 0.25
"""Seconds between two looks at how far it is, on a terminal."""


@contextmanager
def answers_shown(
    answered: Callable[[], tuple[int, int]], tell: Callable[[str], None], console: Console | None, every_s: float = TELL_S
) -> Iterator[None]:
    """Show meanwhile how many prompts are answered, of how many.

    `answered` is asked from another thread. A `console` that is a terminal gets a bar; otherwise `tell` gets a line every
    `every_s` seconds.
    """
    if console is not None and console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)

            def draw() -> None:
                done, total = answered()
                bar.update(task, description=_state(done, total), completed=done, total=total or None)

            with repeating(draw, DRAW_S, THREAD):
                yield
        return
    with repeating(lambda: tell(_line(*answered())), every_s, THREAD):
        yield


def _line(done: int, total: int) -> str:
    return _state(done, total) if done >= total else f"{done} of {total} prompts answered"


def _state(done: int, total: int) -> str:
    return "prompts answered" if done < total else "judging" if total else "starting"
