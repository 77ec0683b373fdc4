"""A console of rich for texts of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megarl.errors import written_out


class SafeConsole(Console):
    """A console of rich whose texts steer no terminal; colours and moves are rich's own. Every console of megarl is one."""

    @property
    def file(self) -> IO[str]:
        """The stream that it writes to, beneath that of `print_safely`."""
        stream = super().file
        safe: IO[str] = getattr(stream, "beneath", stream)
        return safe

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The renderable's pieces, in whose texts control characters are written out."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control:
                yield segment
                continue
            if style is not None and (style.link or style.conceal):  # of colours that somebody printed under a live view
                style = None
            yield Segment(text if text.isprintable() else written_out(text), style)
