"""A temporary folder for what a run and all that it starts leave behind, gone when they are, however they ended. Linux.

Run as a program: waits until its parent is gone, and removes the folders that it is given. The folder is locked as long as its
owner lives; whoever makes the next one removes those that nobody holds, which are left where everything was killed at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.system.process_exit import wait_for_parent

PREFIX = f"megarl-run-{zlib.crc32(socket.gethostname().encode()) & 0xFFFF:04x}-"
"""Of the names of such folders; the temporary folder of another host may be the same one, and its locks are not seen here."""
LONGEST_SOCKET = 107
"""Bytes of a socket's path, which the kernel allows."""
RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store"
"""What Ray adds to the temporary folder; torch adds less, `/torch-shm-dir-XXXXXX/manager.sock`."""
REMOVAL_TRIES = 20
GRACE_S = 2.0
_current: OwnTemporary | None = None


class OwnTemporary:
    """The folder, which is made at once. `environment` leads this process and those that it starts there."""

    def __init__(self, *, is_seen_to: bool = False) -> None:
        """`is_seen_to`: another process removes it if this one is killed; else one is started for that."""
        outer = tempfile.gettempdir()
        _remove_forsaken(Path(outer))
        self.folder, self._locks = self._make(outer)
        self.folders = [self.folder]
        self.ray, name = self.folder / "ray", self.folder
        if len(os.fsencode(f"{self.folder}{RAY_SOCKET}")) > LONGEST_SOCKET:
            short, further = self._make("/tmp")
            self._locks += further
            self.folders.append(short)
            self.ray, name = short / "ray", short / "t"
            name.symlink_to(self.folder)  # files stay where the user wants them, and their sockets have a short name
        self.environment = {"TMPDIR": str(name)} | {
            name: value for name, value in _kept_outside(outer).items() if name not in os.environ
        }
        self._remover = None if is_seen_to else remove_with_this_process(self.folders)

    def _make(self, outer: str) -> tuple[Path, list[int]]:
        while True:
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=outer)
            with contextlib.suppress(FileNotFoundError):  # somebody tidied up between the two calls
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if os.path.exists(folder):
                    return Path(folder), [lock]
                os.close(lock)

    def use(self) -> None:
        """From now on temporary files of this process, and of those that it starts, are there."""
        global _current
        _current = self
        os.environ.update(self.environment)
        tempfile.tempdir = None

    @contextlib.contextmanager
    def led_there(self) -> Iterator[None]:
        """Have processes that are started meanwhile use the folder, but not this one."""
        before = {name: os.environ.get(name) for name in self.environment}
        tempfile.gettempdir()  # is remembered
        os.environ.update(self.environment)
        try:
            yield
        finally:
            _restore(before)

    def remove(self) -> None:
        """Remove it with all that is in it; safe to call twice."""
        remove_folders(self.folders)
        for lock in self._locks:
            os.close(lock)
        self._locks = []
        if self._remover is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._remover, signal.SIGKILL)
                os.waitpid(self._remover, 0)
            self._remover = None


def current() -> OwnTemporary | None:
    """Return the folder that this process uses, if it uses one."""
    return _current


@contextlib.contextmanager
def own_temporary() -> Iterator[None]:
    """Use such a folder meanwhile in this process, which is a command and not somebody's program."""
    global _current
    mine = OwnTemporary()
    before, place = {name: os.environ.get(name) for name in mine.environment}, tempfile.tempdir
    mine.use()
    try:
        yield
    finally:
        _restore(before)
        _current, tempfile.tempdir = None, place
        mine.remove()


def remove_folders(folders: Sequence[str | Path]) -> None:
    """Remove folders in which something may still be written by processes that end just now."""
    for _ in range(REMOVAL_TRIES):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not any(os.path.exists(folder) for folder in folders):
            return
        time.sleep(0.1)


def _restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _kept_outside(outer: str) -> dict[str, str]:
    """Variables that keep what later runs use again where it is without a folder of one's own."""
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": os.path.join(outer, f"torchinductor_{user}"), "RAY_TMPDIR": outer}


def _remove_forsaken(outer: Path) -> None:
    """Remove folders of runs on this machine of which no process is left."""
    for folder in outer.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def remove_with_this_process(folders: Sequence[Path]) -> int:
    """Start the program that removes `folders` when this process is gone; returns its process id."""
    program = [sys.executable, "-P", __file__, str(os.getpid()), *map(str, folders)]
    silent = [(os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_RDWR, 0) for output in range(3)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # megarl may not be installed
    return os.posix_spawn(sys.executable, program, environment, file_actions=silent, setsid=True)


if __name__ == "__main__":
    wait_for_parent(int(sys.argv[1]))
    time.sleep(GRACE_S)
    remove_folders(sys.argv[2:])
