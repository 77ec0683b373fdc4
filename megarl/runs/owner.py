"""A folder has one live owner: the process that is named in its file `owner.json`, and shows that it lives by a beat.

It works where file locks do not, and compares no clocks of two hosts. A claim is taken by a hard link, which one process alone
can make; it beats by the file's time of modification, of which others only see whether it changes; and its owner looks,
before it writes, whether the claim is still there. Nothing heavy is imported: the process that watches a run owns its folder.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from megarl.errors import CheckpointError, ConfigError, OwnerError
from megarl.runs.still_owned import checks
from megarl.system.threads import repeating

FILE = "owner.json"
BEAT_S = 2.0
"""Between two beats, in which the owner also looks whether it still is the owner."""
MISSED_S = 60.0
"""An owner elsewhere whose beat has not changed for so long is taken for dead."""
LOOK_S = 0.5
CHECK_S = 0.5
"""Between two looks of a process that does not beat, at the begin and the end of its phases."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems that have no hard links."""


@dataclass(frozen=True)
class FolderOwner:
    """A process, told from all others: also from one of the same id after it or on another machine."""

    token: str
    host: str = "an unknown host"
    pid: int = 0
    started: int = 0
    """Clock ticks from the boot to its start."""
    boot: str = ""
    """The id that Linux gives to each boot of a machine."""
    machine: str = ""
    """The id of the installation; empty where there is none, as in containers."""
    pids: str = ""
    """The namespace of its process id; containers have their own."""
    user: str = "an unknown user"
    since: str = "an unknown time"
    job: str = ""
    """Id of the batch job that it is part of."""
    requeues: int = 0
    """How often the batch system had started the job again."""

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"

    def fate(self, me: FolderOwner) -> bool | None:
        """Return whether it is alive, as far as the process `me` can know without waiting; None: not."""
        if (self.host, self.boot, self.pids) == (me.host, me.boot, me.pids):
            return self.started == started(self.pid)
        if self.machine and (self.host, self.machine) == (me.host, me.machine) and self.boot != me.boot:
            return False  # it was started again
        if self.job and self.job == me.job and self.requeues < me.requeues:
            return False
        return None


_FIELDS = {field.name: type(field.default) for field in fields(FolderOwner) if field.name != "token"}


def this_process() -> FolderOwner:
    """Describe the process that asks."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for it
        user = f"user {os.getuid()}"
    requeues = os.environ.get("SLURM_RESTART_COUNT", "")
    return FolderOwner(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        started=started(os.getpid()) or 0,
        boot=_text("/proc/sys/kernel/random/boot_id"),
        machine=_text("/etc/machine-id"),
        pids=_link_text("/proc/self/ns/pid"),
        user=user,
        since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        job=os.environ.get("SLURM_JOB_ID", ""),
        requeues=int(requeues) if requeues.isdigit() else 0,
    )


def started(pid: int) -> int | None:
    """When a process of this machine was started, in clock ticks after the boot; None: it has ended."""
    try:
        state, *further = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(further[18])


class Claim:
    """The ownership of a folder by this process, or by the one that forked it; made by `take`."""

    def __init__(self, path: Path, owner: FolderOwner, file: int, made: list[Path]) -> None:
        self.path, self.owner = path, owner
        self._file, self._made = file, made
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._beaten_at = self._checked_at = _now()

    @property
    def is_own(self) -> bool:
        """Return whether this very process took it."""
        return self.owner.pid == os.getpid()

    def beat(self) -> None:
        """Show that the owner lives, if it is time; may be called as often as one likes.

        Raises:
            OwnerError: another process has taken the folder over.
        """
        if _now() - self._beaten_at < BEAT_S:
            return
        self.look()
        with contextlib.suppress(OSError):  # a file system that is gone is told of by who writes results
            os.utime(self._file)
        self._beaten_at = _now()

    def check(self) -> None:
        """Look whether the claim still holds, if that was not done just now.

        Raises:
            OwnerError: another process has taken the folder over.
        """
        if _now() - self._checked_at >= CHECK_S:
            self.look()

    def look(self) -> None:
        """`check`, whenever that was done last."""
        self._checked_at = _now()
        try:
            holder = _read(self.path)
        except OSError:
            return
        if holder is not None and holder.token == self.owner.token:
            return
        if holder is not None:
            raise OwnerError(f"{self.path.parent} was taken over by {holder}; this process writes nothing more and ends")
        if self._is_folder_the_same():
            raise OwnerError(
                f"{self.path} was removed, which gives the folder to whoever starts next; this process writes nothing more and "
                "ends"
            )
        if self.is_own:
            self._put_again()

    def release(self) -> None:
        """Give the folder back, and remove it if nothing came of it; nothing in a process that was forked by the owner."""
        if not self.is_own:
            return
        with contextlib.suppress(OSError):
            holder = _read(self.path)
            if holder is not None and holder.token == self.owner.token:
                self.path.unlink()
        os.close(self._file)
        os.close(self._folder)
        _remove_empty(self._made)

    def _is_folder_the_same(self) -> bool:
        """False where all of the folder was removed or lost, and maybe made anew."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._folder), os.stat(self.path.parent))
        return False

    def _put_again(self) -> None:
        """Claim a folder that has come in the place of the one that was claimed."""
        if not self.path.parent.is_dir():
            return
        mine = self.path.with_name(f".{self.path.name}.{self.owner.token}")
        with contextlib.suppress(OSError):
            mine.write_text(json.dumps(asdict(self.owner), indent=1) + "\n")
            _link(mine, self.path)
            os.close(self._file)
            os.close(self._folder)
            self._file = os.open(self.path, os.O_RDONLY)
            self._folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        _remove(mine)


def take(path: Path, refusal: Callable[[FolderOwner], str], say: Callable[[str], None] | None = None) -> Claim:
    """Claim the folder of `path`, which is made if need be, by the file `path`. Of several processes one gets it.

    An owner that is dead is replaced: at once where this machine can tell, else after `MISSED_S` seconds without a beat, in
    which `say` is told what is waited for. `refusal` makes the sentence of a refusal.

    Raises:
        OwnerError: the owner is alive.
        OSError: nothing can be written there.
    """
    me = this_process()
    made = _make_folder(path.parent)
    mine = path.with_name(f".{path.name}.{me.token}")
    try:
        mine.write_text(json.dumps(asdict(me), indent=1) + "\n")
        while True:
            holder, at, passed = _holder(path)
            if holder is not None and _is_alive(holder, at, me, say or _on_stderr):
                raise OwnerError(refusal(holder))
            if _succeed(path, holder, mine, me, passed):
                return Claim(path, me, os.open(path, os.O_RDONLY), made)
    except BaseException:
        _remove(mine)
        _remove_empty(made)
        raise
    finally:
        _remove(mine)


def _holder(path: Path) -> tuple[FolderOwner | None, Path, list[Path]]:
    """The owner by the file `path`, the file that says so, and the files of succession that led to it.

    Who replaces an owner first makes a link that is named after that owner: so only one does.
    """
    while True:
        found: FolderOwner | None = None
        at, passed = path, list[Path]()
        first = owner = _read(path)
        while owner is not None:
            found, at = owner, passed[-1] if passed else path
            passed.append(_after(path, owner))
            owner = _read(passed[-1])
        if _read(path) == first:  # else a file of succession may be one of somebody who came too late
            return found, at, passed


def _after(path: Path, owner: FolderOwner) -> Path:
    return path.with_name(f".{path.name}.after-{owner.token}")


def _succeed(path: Path, holder: FolderOwner | None, mine: Path, me: FolderOwner, passed: list[Path]) -> bool:
    """Replace `holder`, which is dead, or nobody; False: another process was faster, or the holder has left."""
    if holder is None:
        return _link(mine, path)
    if not _link(mine, passed[-1]):
        return False
    now, _, _ = _holder(path)
    if now is None or now.token != me.token:  # the holder was replaced before, and its file of succession removed
        passed[-1].unlink(missing_ok=True)
        return False
    os.replace(mine, path)
    for step in passed:
        step.unlink(missing_ok=True)
    return True


def _link(mine: Path, path: Path) -> bool:
    """Let `path` be the file `mine`, unless it is there already; of several processes one is told that it did."""
    try:
        os.link(mine, path)
    except FileExistsError:
        return os.stat(mine).st_nlink > 1 and _same_token(mine, path)  # done, but the answer of a server was lost
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return _create(mine, path)
    return True


def _create(mine: Path, path: Path) -> bool:
    """`_link` where there are no hard links: half a file is seen for a moment, and read as an unknown owner's."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(file, "w") as whole:
        whole.write(mine.read_text())
    return True


def _same_token(mine: Path, path: Path) -> bool:
    one, other = _read(mine), _read(path)
    return one is not None and other is not None and one.token == other.token


def _is_alive(holder: FolderOwner, at: Path, me: FolderOwner, say: Callable[[str], None]) -> bool:
    """Return whether `holder` lives, by what this machine knows or by whether its beat changes."""
    known = holder.fate(me)
    if known is not None:
        return known
    say(f"megarl: {at.parent} was owned by {holder}; it is taken over if that gives no sign of life for {MISSED_S:.0f} s")
    first, ends_at = _beat_of(at), time.monotonic() + MISSED_S
    while time.monotonic() < ends_at:
        time.sleep(LOOK_S)
        now = _beat_of(at)
        if now != first:
            # gone or another's: whoever tries to replace the holder finds that out
            return now is not None and first is not None and now[0] == first[0]
    return False


def _beat_of(path: Path) -> tuple[int, int] | None:
    """Number and time of modification of the file; opened, as shared file systems tell others' changes to who opens."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        return status.st_ino, status.st_mtime_ns
    finally:
        os.close(file)


def owner_in(content: bytes) -> FolderOwner:
    """The owner in a file's content; raises ValueError where it has no token that can name a file."""
    read = from_json(content)
    token = read.get("token") if isinstance(read, dict) else None
    if not isinstance(token, str) or not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", token):
        raise ValueError("it names no owner")
    return FolderOwner(token, **{name: read[name] for name, kind in _FIELDS.items() if type(read.get(name)) is kind})


def _read(path: Path, tries: int = 5) -> FolderOwner | None:
    """The owner that a file names: an unknown one where nobody can read it, None where there is no file.

    Half a file is read again: without hard links it is seen while it is written.
    """
    try:
        return owner_in(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # it was replaced from another host
            return FolderOwner(token="stale")
        raise
    except ValueError:
        if tries == 1:
            return FolderOwner(token="unreadable")
    time.sleep(0.1)
    return _read(path, tries - 1)


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder with those above it; returns which were made, the highest first."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, given the highest first, as far as nothing is in them."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)


def _now() -> float:
    """Seconds, those in which the machine slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _on_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _link_text(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


# a run and its folder -------------------------------------------------------------------------------------------------

_held: list[Claim] = []
"""Claims of runs in this process, or in the one that forked it."""


def take_run(config: Any) -> Claim:
    """Claim the folder of a run for the process that watches it; who has it must call `beat` and in the end `leave_run`.

    Raises:
        OwnerError: a run that is alive has it.
        ConfigError: nothing can be written there.
    """
    folder = Path(config.run_folder)

    def refusal(owner: FolderOwner) -> str:
        return (
            f"{folder} belongs to a run that is alive: {owner}; end that with `kill {owner.pid}` on {owner.host} (it saves "
            f"first), give this run another run.name, or take the folder over by removing {folder / FILE}"
        )

    try:
        claim = take(folder.absolute() / FILE, refusal)
    except OSError as error:
        raise ConfigError(
            f"run.folder is '{config.run.folder}', but nothing can be written to {folder} ({error.strerror})"
        ) from None
    _held.append(claim)
    checks.append(claim.check)
    return claim


def leave_run(claim: Claim) -> None:
    """Give the folder of a run back."""
    _held.remove(claim)
    checks.remove(claim.check)
    claim.release()


@contextlib.contextmanager
def owned(config: Any, *, leads: bool = True) -> Iterator[None]:
    """Own the folder of a run meanwhile, unless the process that watches this one does. `leads`: this process writes files.

    Raises:
        OwnerError: a run that is alive has it.
        ConfigError: nothing can be written there.
    """
    folder = Path(config.run_folder).absolute()
    if not leads or any(claim.path.parent == folder and not claim.is_own for claim in _held):
        yield
        return
    claim = take_run(config)
    try:
        with beating(claim):
            yield
    finally:
        leave_run(claim)


@contextlib.contextmanager
def beating(claim: Claim) -> Iterator[None]:
    """Have a thread show meanwhile that the owner lives; one that was replaced is not told."""

    def beat() -> None:
        with contextlib.suppress(OwnerError):
            claim.beat()

    with repeating(beat, BEAT_S, "owner of a folder"):
        yield


# a conversion and its target ------------------------------------------------------------------------------------------


def take_target(path: Path, what: str) -> Claim:
    """Claim, by the file `path`, the folder in which a command writes `what`; who has it calls `beat` and `release`.

    Raises:
        OwnerError: a command that is alive writes it.
        CheckpointError: nothing can be written there.
    """

    def refusal(owner: FolderOwner) -> str:
        return f"another command is at work on {what}: {owner}; wait for it, or end it with `kill {owner.pid}` on {owner.host}"

    try:
        return take(path.absolute(), refusal)
    except OSError as error:
        raise CheckpointError(f"nothing can be written to '{path.parent}' ({error.strerror})") from None


@contextlib.contextmanager
def writing(target: str | Path) -> Iterator[None]:
    """Be the only command that writes the folder `target` meanwhile; raises as `take_target` does."""
    folder = Path(target).absolute()
    claim = take_target(folder.with_name(f".{folder.name}.{FILE}"), f"'{target}'")
    try:
        with beating(claim):
            yield
        claim.look()
    finally:
        claim.release()
