"""The part of a run that replaces ranks which are lost, as the run knows it: an option has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Recovery(Protocol):
    """Replaces ranks whose processes are lost, and has what they computed computed again. A `run` is one of `RlRun`."""

    def attempts(self, run: Any) -> Iterator[AbstractContextManager[None]]:
        """Attempts at what a step computes on ranks; a loss ends one without an error, and another follows."""
        ...

    def again(self, run: Any, work: Callable[[], T]) -> T:
        """Do `work`, which leaves ranks as they are, and once more if some were lost in it."""
        ...
