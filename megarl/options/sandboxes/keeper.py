"""The program of a process that keeps one sandbox: a folder, and the commands that run in it, one at a time. Run by path.

It imports nothing of megarl. In: lines of JSON, first the setting (`Setting` in `sandbox.py`), then commands. Out: a line
`{"folder"}` or `{"problem"}`, then a line for each command (`CommandResult`). When its input closes, or its parent is gone, it
ends what runs, removes the folder, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECK_S = 0.2
"""Between two looks at what the processes of a command use."""
FLOOD = 64
"""Times of what is kept of its output after which a command is ended."""
OVERFULL = 2
"""Times of its size above which the folder is emptied."""
ENTRY_BYTES = 4096
"""Least bytes that each file and folder counts."""
CONTAINER_S = 60.0
"""For each of a container's own commands."""
DEEPEST = 3000
"""Bytes of a path below which folders are looked into; deeper ones count as too much."""
_SUBREAPER, _PDEATHSIG = 36, 1
_NEEDED = 1 << 0 | 1 << 2 | 1 << 6 | 1 << 7  # CAP_CHOWN, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID
_LARGEST_USER = 2_000_000_000


class Keeper:
    """The folder and the commands in it."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.setting = setting
        self.container: dict[str, Any] = setting["container"] or {}
        self.user = _free_user() if setting["has_own_user"] else None
        self.folder = Path(tempfile.mkdtemp(prefix="megarl-sandbox-"))
        self.work = self.folder / "work"
        self._left, self._ended, self._room_bytes = b"", False, 0
        ctypes.CDLL(None).prctl(_SUBREAPER, *map(ctypes.c_ulong, (1, 0, 0, 0)))  # what loses its parent becomes a child here

    def prepare(self) -> str:
        """Make the folder and its first files; what is wrong with them, or an empty text."""
        if self.setting["copy_from"] is not None:
            shutil.copytree(self.setting["copy_from"], self.work)
        self.work.mkdir(exist_ok=True)
        (self.folder / "tmp").mkdir()
        for name, text in self.setting["files"].items():
            try:
                path = self.work / name
                if path.resolve() == self.work or self.work not in path.resolve().parents:
                    return f"the file '{name}' would lie outside the sandbox's folder"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            except (OSError, ValueError) as error:  # a name that is too long, has a null, or is that of a folder
                return f"the file {name[:200]!r} cannot be made: {getattr(error, 'strerror', None) or error}"
        if _used_bytes(self.folder) > self.setting["disk_bytes"]:
            return "the files that it begins with are more than its disk_mb"
        if self.user is not None:
            for path in (self.folder, *self.folder.rglob("*")):
                os.chown(path, self.user, self.user, follow_symlinks=False)
        if self.container and self.container["start"]:
            return self._tell("start")
        return ""

    def lines(self) -> Iterator[str]:
        """What is asked, until the input closes."""
        while not self._ended:
            while b"\n" not in self._left and not self._ended:
                self._read_more()
            line, newline, rest = self._left.partition(b"\n")
            if newline:
                self._left = rest
                yield line.decode()

    def _read_more(self) -> None:
        chunk = os.read(0, 1 << 20)
        self._ended = not chunk
        self._left += chunk

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run a command until it ends, is out of time, or uses too much; nothing that it started outlives it."""
        deadline = time.monotonic() + asked["timeout_s"]
        self._room_bytes = max(self.setting["disk_bytes"], _used_bytes(self.folder))  # a full folder can still be cleared
        process = _Started(self, asked)
        ended_by = ""
        next_check = time.monotonic() + CHECK_S
        with selectors.DefaultSelector() as selector:
            for file in (*process.outputs, process.handle, 0):
                selector.register(file, selectors.EVENT_READ)
            while not ended_by and not process.has_ended and not self._ended:
                now = time.monotonic()
                for key, _ in selector.select(max(min(deadline, next_check) - now, 0)):
                    if key.fd == 0:
                        self._read_more()
                    elif key.fd == process.handle:
                        process.has_ended = True
                    elif not process.read(key.fd):
                        selector.unregister(key.fd)
                now = time.monotonic()
                if now >= deadline and not process.has_ended:
                    ended_by = "time"
                elif process.read_bytes > FLOOD * self.setting["output_bytes"]:
                    ended_by = "output"
                elif now >= next_check:
                    ended_by = self._excess()
                    next_check = time.monotonic() + max(CHECK_S, 4 * (time.monotonic() - now))
        code, is_lost = process.end(), not self._end_in_container()
        used_bytes = _used_bytes(self.folder)
        if not ended_by and used_bytes > self._room_bytes:
            ended_by = "disk"
        if used_bytes > OVERFULL * self.setting["disk_bytes"]:
            self._empty()
        return {**process.said(), "exit_code": code, "ended_by": ended_by, "is_lost": is_lost}

    def _empty(self) -> None:
        """Remove what is in the folder, which was filled faster than it is looked at."""
        for folder in (self.work, self.folder / "tmp"):
            argv = ["find", str(folder), "-mindepth", "1", "-delete"]
            subprocess.run(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)

    def _end_in_container(self) -> bool:
        """End what a command left in the container; whether it is ended."""
        if not self.container or not self.container["after"] or self._ended:
            return True
        return not self._tell("after") or not self._tell("recover")

    def _tell(self, what: str) -> str:
        """Run one of the container's own commands; what is wrong, or an empty text."""
        argv = self._filled(self.container[what])
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=CONTAINER_S, check=False, errors="replace")
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""

    def _excess(self) -> str:
        """What the processes use too much of, if anything."""
        limits = self.setting
        if _used_bytes(self.folder) > self._room_bytes:
            return "disk"
        if self.container:  # it holds its own limits
            return ""
        pids = list(_descendants(os.getpid()))
        if len(pids) > limits["processes"]:
            return "processes"
        if sum(map(_resident_bytes, pids)) > limits["memory_bytes"] < sum(map(_proportional_bytes, pids)):
            return "memory"
        deleted = sum(_deleted_bytes(pid) for pid in pids)
        return "disk" if deleted + _used_bytes(self.folder) > self._room_bytes else ""

    def _filled(self, argv: list[str]) -> list[str]:
        user = self.user if self.user is not None else os.getuid()
        fields = {"{name}": self.folder.name, "{work}": str(self.work), "{user}": f"{user}:{user}"}
        for field, value in fields.items():
            argv = [argument.replace(field, value) for argument in argv]
        return argv

    def become(self, asked: dict[str, Any]) -> None:
        """In the fork: be the command."""
        os.chdir(self.work)
        limits = self.setting
        environment = {**limits["environment"], **asked["environment"]}
        if self.container:
            variables = [part for key, value in environment.items() for part in (self.container["variable"], f"{key}={value}")]
            wrap = self._filled(self.container["wrap"])
            index = wrap.index("{environment}")
            argv = [*wrap[:index], *variables, *wrap[index + 1 :], *asked["command"]]
            os.execvp(argv[0], argv)
        import confinement

        of_commands = confinement.CommandLimits(
            limits["memory_bytes"], limits["disk_bytes"], limits["processes"],
            others=confinement.tasks_of_user() if self.user is None else 0,
            user=self.user, port=limits["port"], network=limits["network"],
        )  # fmt: skip
        confinement.confine_commands(of_commands, str(self.folder), limits["readable"])
        ctypes.CDLL(None).prctl(_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        folders = {"HOME": str(self.work), "TMPDIR": str(self.folder / "tmp"), "PWD": str(self.work)}
        os.execvpe(asked["command"][0], asked["command"], {**environment, **folders})

    def remove(self) -> None:
        """Remove the container, and the folder, however deep and under whatever names."""
        if self.container and self.container["remove"]:
            self._tell("remove")
        for _ in range(3):
            subprocess.run(["rm", "-rf", "--", str(self.folder)], stderr=subprocess.DEVNULL, check=False)
            if not self.folder.exists():
                return
            subprocess.run(["chmod", "-R", "u+rwX", str(self.folder)], stderr=subprocess.DEVNULL, check=False)


class _Started:
    """One command that runs, in a process group of its own that nothing in it can leave."""

    def __init__(self, keeper: Keeper, asked: dict[str, Any]) -> None:
        self._kept_bytes = keeper.setting["output_bytes"]
        self.has_ended, self.read_bytes = False, 0
        stdin_fd = os.memfd_create("stdin")
        with open(stdin_fd, "wb", closefd=False) as stdin:
            stdin.write(asked["stdin"].encode(errors="surrogateescape"))
        os.lseek(stdin_fd, 0, os.SEEK_SET)
        pipes = [os.pipe() for _ in range(3)]
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                for descriptor, file in enumerate((stdin_fd, pipes[0][1], pipes[1][1])):
                    os.dup2(file, descriptor)
                os.dup2(pipes[2][1], 3, inheritable=False)
                os.closerange(4, 1 << 16)
                keeper.become(asked)
            except BaseException as error:  # noqa: BLE001 - told on the pipe that a started program no longer has
                os.write(3, f"{type(error).__name__}: {error}"[:2000].encode())
            finally:
                os._exit(127)
        with contextlib.suppress(OSError):  # it has ended, or done so itself
            os.setpgid(self.pid, self.pid)
        for file in (stdin_fd, *(writer for _, writer in pipes)):
            os.close(file)
        self.outputs = [pipes[0][0], pipes[1][0]]
        self._texts = dict.fromkeys(self.outputs, b"")
        for file in self.outputs:
            os.set_blocking(file, False)
        self._problem = pipes[2][0]
        self.handle = os.pidfd_open(self.pid)

    def read(self, file: int) -> bool:
        """Read what is there; False at the end of it."""
        try:
            chunk = os.read(file, 1 << 16)
        except BlockingIOError:
            return True
        self.read_bytes += len(chunk)
        self._texts[file] += chunk[: self._kept_bytes - len(self._texts[file])]
        return bool(chunk)

    def end(self) -> int:
        """End it with all that it started; its exit code, or minus the signal that ended it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        code = 0
        with contextlib.suppress(ChildProcessError):
            while True:  # orphans of the group have become children of this process
                pid, status = os.waitpid(-self.pid, 0)
                if pid == self.pid:
                    code = os.waitstatus_to_exitcode(status)
        for file in self.outputs:
            before = -1
            while self.read_bytes != before:
                before = self.read_bytes
                self.read(file)
        return code

    def said(self) -> dict[str, Any]:
        """What it printed, as far as it is kept, and why it did not start."""
        problem = os.read(self._problem, 4096).decode(errors="replace")
        stdout, stderr = (self._texts[file].decode(errors="replace") for file in self.outputs)
        for file in (*self.outputs, self._problem, self.handle):
            os.close(file)
        is_cut = self.read_bytes > sum(map(len, self._texts.values()))
        return {"stdout": stdout, "stderr": stderr, "is_cut": is_cut, "problem": problem}


def _free_user() -> int | None:
    """A user that nobody is, of those that this process may become; None: it is not root, or they are too few."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    if os.geteuid() or capabilities & _NEEDED != _NEEDED:
        return None
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        last = min(first + count - 1, _LARGEST_USER)
        if last - first > 1 << 20:
            return last - random.randrange(1 << 19)
    return None


def _descendants(pid: int) -> Iterator[int]:
    parents = [pid]
    while parents:
        for task in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = [*map(int, task.read_text().split())]
                yield from children
                parents += children


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional_bytes(pid: int) -> int:
    """Pages that several processes share count in parts."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def _deleted_bytes(pid: int) -> int:
    """Bytes of files that it has open and that are in no folder any more."""
    total = 0
    with contextlib.suppress(OSError):
        for file in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(file.path)
                if not status.st_nlink:
                    total += status.st_blocks * 512
    return total


def _used_bytes(folder: Path) -> int:
    """What lies in `folder`; what cannot be looked at counts as too much."""
    total, folders = 0, [str(folder)]
    while folders:
        path = folders.pop()
        if len(path) > DEEPEST:
            return 1 << 62
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        total += max(status.st_blocks * 512, ENTRY_BYTES)
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return 1 << 62
    return total


def main() -> None:
    """Keep a sandbox until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setting = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[union-attr]
    sys.path.insert(0, setting["library"])
    import confinement  # noqa: F401 - once, for all forks

    keeper = Keeper(setting)
    try:
        problem = keeper.prepare()
        print(json.dumps({"folder": str(keeper.folder), "problem": problem}), file=answers, flush=True)
        for line in keeper.lines():
            print(json.dumps(keeper.run(json.loads(line))), file=answers, flush=True)
    finally:
        keeper.remove()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its input says when it ends
    with contextlib.suppress(BrokenPipeError):
        main()
