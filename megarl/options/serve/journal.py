"""Training requests on disk, so that models are made again after a crash: by model a snapshot, and the requests behind it.

A request is appended as the bytes of its body, and is durable once `flush` has returned: before its result is given out. What
was not durable was not answered, and the client sends it again.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.observe.record_lines import object_line
from megarl.options.serve.places import folder_of, name_of
from megarl.runs.manifest import sync_folder
from megarl.system.atomic_files import whole_folder, write_text_atomically

MAGIC = b"mjr1"
_HEAD = struct.Struct("<4sqHQQII")
"""Magic, sequence number, bytes of the kind, bytes of the body, bytes of the file that were durable, crc32 of kind and body,
crc32 of all before."""
_NUMBER = "012d"
SLACK_BYTES = 64 << 20
"""Bytes by which a file of requests may grow, beside as many as it had, before it `has_grown`."""
Content = bytes | memoryview


@dataclass(frozen=True)
class JournalEntry:
    """A request: its sequence number, its kind (route and encoding, as the server names them), and its body.

    The body of one that was read is a view of its file, which is in memory only where somebody reads it.
    """

    seq: int
    kind: str
    body: Content


Keep = Callable[[JournalEntry], JournalEntry | None]


@dataclass(frozen=True)
class Replay:
    """All that brings a model back: load `snapshot` (None: make the model anew), then do `entries` in order.

    `facts` are those of `begin`; `seq` is the last sequence number that the snapshot has in it.
    """

    facts: Mapping[str, Any]
    snapshot: Path | None
    seq: int
    entries: Sequence[JournalEntry]


@dataclass
class _Log:
    """An open file of requests; `written` bytes of it are good, `synced` of these durable; it was made with `left`."""

    path: Path
    seq: int
    file: FileIO
    written: int
    synced: int
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class RequestJournal:
    """Journals of models by name, below one folder. Methods may be called by several threads."""

    def __init__(self, root: Path) -> None:
        """Open nothing yet; `root` is made."""
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        self._logs: dict[str, _Log] = {}
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def models(self) -> list[str]:
        """Names of models that have a journal, those that were begun first in front."""
        folders = [path for path in self._root.iterdir() if (path / "facts.json").is_file()]
        return [name_of(path.name) for path in sorted(folders, key=lambda path: (path / "facts.json").stat().st_mtime_ns)]

    def begin(self, model: str, facts: Mapping[str, Any], entries: Iterable[tuple[int, str, bytes]] = ()) -> None:
        """Start the journal of a new model, durable on return, with its first requests: numbers, kinds and bodies.

        `facts` (JSON-able) are what it takes to make the model, and whose it is.

        Raises:
            CheckpointError: the model has a journal.
        """
        folder = self._folder(model)
        if (folder / "facts.json").exists():
            raise CheckpointError(f"model {model} has a journal already")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write_log(folder / _log_name(0), (JournalEntry(*entry) for entry in entries))
        write_text_atomically(folder / "facts.json", json.dumps(dict(facts), indent=1))
        sync_file(folder / "facts.json")
        sync_folder(folder)
        sync_folder(self._root)

    def append(self, model: str, seq: int, kind: str, body: bytes) -> None:
        """Write a request behind the others; a failed write leaves the journal as it was.

        Raises:
            OSError: the disk is full or gone.
        """
        with self._held(model) as log:
            content = _record(JournalEntry(seq, kind, body), log.synced)
            try:
                log.file.write(content)
            except OSError:
                with suppress(OSError):
                    log.file.truncate(log.written)
                    log.file.seek(log.written)
                raise
            log.written += len(content)

    def flush(self) -> None:
        """Return when all that was appended before the call is durable. Calls at the same time share their waits."""
        with self._flushing:
            with self._lock:
                logs = list(self._logs.values())
            for log in logs:
                with log.lock:
                    if log.synced >= log.written or log.file.closed:
                        continue
                    descriptor, written = os.dup(log.file.fileno()), log.written
                try:
                    os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)
                with log.lock:
                    log.synced = max(log.synced, written)

    def snapshot(self, model: str, seq: int, write: Callable[[Path], None], carried: Iterable[JournalEntry] = ()) -> None:
        """Have `write` make a folder with the model's state behind request `seq`, and forget the requests up to it.

        The state must have no gradients that wait for an optimizer step: a snapshot stands behind one. Requests may be appended
        meanwhile. `carried` (answers that clients have not fetched, say) come first in the new journal. Whatever fails, the
        snapshot before and its requests are still there. A second snapshot behind the same request is not made.
        """
        with self._held(model) as log:
            if seq <= log.seq:
                return
        folder = self._folder(model)
        target = folder / _snapshot_name(seq)
        shutil.rmtree(target, ignore_errors=True)  # of a crash before its requests were written
        with whole_folder(target) as part:
            write(part / "state")
            sync_tree(part)
        sync_folder(folder)
        with self._held(model) as log:
            path = folder / _log_name(seq)
            _write_log(path, chain(carried, (entry for entry in _read(log.path)[0] if entry.seq > seq)))
            self._go_on(model, log, path)
        for old in _numbers(folder, "requests-"):
            if old < seq:
                (folder / _log_name(old)).unlink(missing_ok=True)
                shutil.rmtree(folder / _snapshot_name(old), ignore_errors=True)

    def bytes_of(self, model: str) -> int:
        """Bytes of the model's file of requests; 0 where it has no journal."""
        return log.written if (log := self._logs.get(model)) is not None else 0

    def has_grown(self, model: str) -> bool:
        """Return whether the file of requests is so much longer than after it was made that `trim` is worth its time."""
        log = self._logs.get(model)
        return log is not None and log.written > 2 * log.left + SLACK_BYTES

    def trim(self, model: str, keep: Keep, carried: Iterable[JournalEntry] = ()) -> None:
        """Write the file of requests anew, of each what `keep` returns (None: nothing), with `carried` in front.

        Whatever fails, and wherever a crash comes, all requests are there or those that are kept. Requests that are appended
        meanwhile are kept; one thread at a time may trim a model or make its snapshot.

        Raises:
            CheckpointError: the model has no journal, or requests in it that were durable are damaged.
        """
        with self._held(model) as log:
            path, begun = log.path, log.written
        before = (kept for entry in _read(path, begun)[0] if (kept := keep(entry)) is not None)
        with ExitStack() as held:

            def meanwhile() -> Iterator[JournalEntry]:
                held.enter_context(self._held(model))
                yield from _read(path, start=begun)[0]

            _write_log(path, chain(carried, before, meanwhile()))
            self._go_on(model, log, path)

    def _go_on(self, model: str, log: _Log, path: Path) -> None:
        """Have requests be appended to the file at `path` from now on, in place of that of `log`, which the caller holds."""
        made = _open(path)
        with self._lock:
            self._logs[model] = made
        log.file.close()

    def replay(self, model: str) -> Replay:
        """Read what brings a model back. A last request that was written in part is dropped, also from the file.

        Raises:
            CheckpointError: the model has no journal, or requests in it that were durable are damaged.
        """
        folder = self._folder(model)
        try:
            facts = object_line((folder / "facts.json").read_bytes())
        except (OSError, ValueError):
            raise CheckpointError(f"model {model} has no journal that can be read") from None
        with self._held(model) as log:
            snapshot = folder / _snapshot_name(log.seq) / "state"
            return Replay(facts, snapshot if log.seq else None, log.seq, _read(log.path)[0])

    def drop(self, model: str) -> None:
        """Forget a model."""
        folder = self._folder(model)
        with self._lock:
            log = self._logs.pop(model, None)
            (folder / "facts.json").unlink(missing_ok=True)  # without it nobody opens the file of requests again
        if log is not None:
            with log.lock:
                log.file.close()
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Make everything durable and close all files."""
        self.flush()
        with self._lock:
            for log in self._logs.values():
                log.file.close()
            self._logs.clear()

    def _folder(self, model: str) -> Path:
        return self._root / folder_of(model)

    @contextmanager
    def _held(self, model: str) -> Iterator[_Log]:
        """The model's file of requests, and nobody else writes to it."""
        while True:
            log = self._log(model)
            with log.lock:
                if not log.file.closed:  # a snapshot has another file now
                    yield log
                    return

    def _log(self, model: str) -> _Log:
        """The open file of a model's requests, the newest that has its snapshot; it is mended when it is opened first."""
        with self._lock:
            log = self._logs.get(model)
            if log is None:
                folder = self._folder(model)
                whole = [n for n in _numbers(folder, "requests-") if n == 0 or (folder / _snapshot_name(n)).exists()]
                if not whole or not (folder / "facts.json").exists():
                    raise CheckpointError(f"model {model} has no journal")
                log = self._logs[model] = _open(folder / _log_name(max(whole)))
            return log


def _record(entry: JournalEntry, synced: int) -> bytes:
    kind = entry.kind.encode()
    content = zlib.crc32(entry.body, zlib.crc32(kind))
    head = _HEAD.pack(MAGIC, entry.seq, len(kind), len(entry.body), synced, content, 0)[:-4]
    return b"".join((head, struct.pack("<I", zlib.crc32(head)), kind, entry.body))


def _read(path: Path, end: int | None = None, *, start: int = 0) -> tuple[list[JournalEntry], int]:
    """The requests of a file from byte `start` up to `end`, and where they end; what is behind was never durable.

    Raises:
        CheckpointError: a request that was durable is damaged.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return [], 0
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    entries, good = _read_content(content, start, end)
    if end is None:
        for behind in _places_of_magic(content, good):
            if (found := _entry_at(content, behind)) and found[2] > good:
                raise CheckpointError(f"the journal '{path}' is damaged at byte {good}, in a request that was durable")
    return entries, good


def _read_content(content: bytes | mmap.mmap, start: int = 0, end: int | None = None) -> tuple[list[JournalEntry], int]:
    """The requests of `content` from byte `start` up to `end`, and where they end."""
    entries, good = [], start
    while (end is None or good < end) and (found := _entry_at(content, good)):
        entries.append(found[0])
        good = found[1]
    return entries, good


def _entry_at(content: bytes | mmap.mmap, place: int) -> tuple[JournalEntry, int, int] | None:
    """The request that begins at `place`, where it ends, and how much was durable when it was written; None if it is none."""
    if place + _HEAD.size > len(content):
        return None
    magic, seq, kind_bytes, body_bytes, synced, checksum, head_checksum = _HEAD.unpack_from(content, place)
    if magic != MAGIC or zlib.crc32(content[place : place + _HEAD.size - 4]) != head_checksum:
        return None
    start = place + _HEAD.size
    end = start + kind_bytes + body_bytes
    view = memoryview(content)
    if end > len(content) or zlib.crc32(view[start:end]) != checksum:
        return None
    return JournalEntry(seq, content[start : start + kind_bytes].decode(), view[start + kind_bytes : end]), end, synced


def _places_of_magic(content: bytes | mmap.mmap, place: int) -> Iterator[int]:
    while (place := content.find(MAGIC, place + 1)) >= 0:
        yield place


def _write_log(path: Path, entries: Iterable[JournalEntry]) -> None:
    """Write a whole file of requests, durable before it has its name."""
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        for entry in entries:
            out.write(_record(entry, 0))
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
    sync_folder(path.parent)


def _open(path: Path) -> _Log:
    _, good = _read(path)
    file = path.open("r+b", buffering=0)
    file.truncate(good)
    file.seek(good)
    os.fsync(file.fileno())
    return _Log(path, int(path.stem.rpartition("-")[2]), file, good, good, good)


def sync_tree(folder: Path) -> None:
    """Make a folder with everything in it durable."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            sync_file(path)
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _log_name(seq: int) -> str:
    return f"requests-{seq:{_NUMBER}}.log"


def _snapshot_name(seq: int) -> str:
    return f"snapshot-{seq:{_NUMBER}}"


def _numbers(folder: Path, prefix: str) -> list[int]:
    return [int(path.stem[len(prefix) :]) for path in folder.glob(f"{prefix}*.log") if path.stem[len(prefix) :].isdigit()]
