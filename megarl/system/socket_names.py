"""A process's word on the sockets that it listens on, for `megarl doctor --ports` of the same user.

A name is that of an empty file in memory: it is in no folder, nobody else can write it, and it is gone with the process.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

NOTHING = "nothing"
"""By which somebody is let in where nobody is asked."""
_NAME = re.compile(r"/memfd:megarl (\d+) \| (.+) \| (.+) \(deleted\)")


class SocketName:
    """Says what listens on `port` and `by` what it lets somebody in, until it is closed."""

    def __init__(self, port: int, role: str, by: str) -> None:
        self._file: int | None = os.memfd_create(f"megarl {port} | {role} | {by}")

    def close(self) -> None:
        """Say no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def socket_names(pid: int) -> dict[int, tuple[str, str]]:
    """Role and by what, by port, of what a process says; nothing of one that is gone, or another user's."""
    named = {}
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if (match := _NAME.fullmatch(os.readlink(file))) is not None:
                    named[int(match[1])] = (match[2], match[3])
    return named
