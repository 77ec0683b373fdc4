"""Files that a run appends lines to, when it goes on: a torn end is cut off, and lines of steps that come again are dropped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

from megarl.errors import counted
from megarl.observe.growing_file import LONGEST_LINE, whole_lines
from megarl.observe.record_lines import stepped_line
from megarl.system.atomic_files import whole_file

APPENDED = ("metrics", "samples", "distributions", "reward_errors", "experts", "trace", "slow_ranks")
"""Files of a run's folder that its driver appends lines to."""


def mend_ends(folder: Path, names: Iterable[str] = APPENDED) -> list[str]:
    """Cut off what a crash or a full disk has left of a last line, in the files `names` of a run; a sentence on what was cut.

    Nobody may be writing to them. No sentence: every file ends in a whole line, or is not there.
    """
    cut = {f"{name}.jsonl": cut_torn_end(folder / f"{name}.jsonl") for name in names}
    told = ", ".join(f"{file} ({counted(nbytes, 'byte')})" for file, nbytes in cut.items() if nbytes)
    return [f"removed, because an earlier attempt was cut off while it wrote them: the ends of {told}"] if told else []


def cut_torn_end(path: Path) -> int:
    """Cut `path` behind its last line that is whole and JSON; returns the bytes that were cut. A missing file has none."""
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            begin = _end_of_line(file, end - 1)
            if _is_whole(file, begin, end):
                break
            end = begin
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
        return size - end


def keep_lines(path: Path, last_step: int | None) -> None:
    """Leave the whole lines up to those of `last_step` (None: none), damaged ones in their midst, too; the file is made."""
    kept: list[tuple[int, int]] = []
    with whole_file(path) as target:
        if last_step is None or not path.is_file():
            return
        with path.open("rb") as file:
            at, is_kept = 0, True
            for line, nbytes in whole_lines(file):
                with suppress(ValueError):
                    is_kept = stepped_line(line)["step"] <= last_step
                if is_kept and kept and kept[-1][1] == at:
                    kept[-1] = (kept[-1][0], at + nbytes)
                elif is_kept:
                    kept.append((at, at + nbytes))
                at += nbytes
            for begin, end in kept:
                file.seek(begin)
                for start in range(begin, end, 65_536):
                    target.write(file.read(min(65_536, end - start)))


def _end_of_line(file: BinaryIO, before: int) -> int:
    """Find the end of the line before byte `before`, behind its line break; 0: there is none."""
    while before > 0:
        begin = max(0, before - 65_536)
        file.seek(begin)
        place = file.read(before - begin).rfind(b"\n")
        if place >= 0:
            return begin + place + 1
        before = begin
    return 0


def _is_whole(file: BinaryIO, begin: int, end: int) -> bool:
    """Return whether the bytes are a line with its end, of JSON; one that is too long to be read counts as such."""
    file.seek(end - 1)
    if file.read(1) != b"\n":
        return False
    if end - begin > LONGEST_LINE:
        return True
    file.seek(begin)
    try:
        return isinstance(from_json(file.read(end - begin)), dict)
    except ValueError:
        return False
