"""A large new file, written past the page cache where the file system can do that, with the checksum of what was meant.

Through the cache every byte takes memory that the kernel has to find first: several times the work of the copy, done by cores
that a training step could use, and at the price of what else is cached.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any, Self

import xxhash

_BLOCK = 2**22
_ALIGNMENT = 4096
"""Multiple of memory, positions and lengths: no disk asks for more."""


class DirectFile:
    """A context manager; `finish` brings the file to the disk, leaving it without that does not."""

    def __init__(self, path: str | Path) -> None:
        """Make the file, or empty one that is there; raises OSError."""
        self._staged = mmap.mmap(-1, _BLOCK)  # memory that is aligned
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what a file system says that has no other way than the cache
                raise
            self._file = os.open(path, flags, 0o644)
        self._fill = 0
        self._digest = xxhash.xxh3_128()
        self.position = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)
        self._staged.close()

    def write(self, content: Any) -> None:
        """Append bytes, or a contiguous array of them; raises OSError."""
        with memoryview(content) as whole:
            for start in range(0, len(whole), _BLOCK):
                block = whole[start : start + _BLOCK]
                self._digest.update(block)
                self._stage(block)
            self.position += len(whole)

    def finish(self) -> str:
        """All of it is on the disk on return; returns the XXH3-128 of what was to be written. Raises OSError."""
        whole = self._fill - self._fill % _ALIGNMENT
        self._pass_on(0, whole)
        self._through_the_cache()
        self._pass_on(whole, self._fill)
        os.fsync(self._file)
        return self._digest.hexdigest()

    def _stage(self, block: memoryview) -> None:
        while len(block):
            fits = min(len(block), _BLOCK - self._fill)
            self._staged[self._fill : self._fill + fits] = block[:fits]
            self._fill += fits
            block = block[fits:]
            if self._fill == _BLOCK:
                self._pass_on(0, _BLOCK)
                self._fill = 0

    def _pass_on(self, start: int, end: int) -> None:
        with memoryview(self._staged) as staged:
            while start < end:
                try:
                    start += os.write(self._file, staged[start:end])
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._is_direct():
                        raise
                    self._through_the_cache()  # it wants more than is known of it here

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & os.O_DIRECT)

    def _through_the_cache(self) -> None:
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
