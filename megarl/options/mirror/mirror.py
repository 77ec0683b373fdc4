"""A run's second place: `run.mirror`, laid out as the run's folder is, so that what is there can be used as one.

A checkpoint counts there once its manifest is, which is sent last; what is sent and fetched is compared with the manifest's
checksums on the way. Metrics, samples and other records of the run go along; `mirror.json` has their checksums.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import IO

import xxhash

from megarl.errors import CheckpointError, MirrorError
from megarl.options.mirror.s3_store import S3Store
from megarl.options.mirror.stores import BLOCK, HIDDEN_PREFIX, CopyStore, FolderStore, is_own_file
from megarl.runs import owner
from megarl.runs.manifest import FORMAT, MANIFEST, FileRecord, files_of, parse, render
from megarl.runs.run_checkpoint import CheckpointFolder, best_step, step_of

CHECKPOINTS = "checkpoints"
MEDIA = "media"
INDEX = "mirror.json"
_PROBE = ".writable"
_COPY = re.compile(rf"{CHECKPOINTS}/(?:{re.escape(HIDDEN_PREFIX)})?step_\d{{6,}}/")


class Mirror:
    """The second place of a run, and what goes there and comes back.

    `keep` and `best` are as in `CheckpointFolder`. `go_on` is asked between blocks; it raises what ends a copy early.
    """

    def __init__(
        self, store: CopyStore, keep: int = 0, best: str | None = None, go_on: Callable[[], None] = lambda: None
    ) -> None:
        self.store, self.keep, self.best, self._go_on = store, keep, best, go_on
        self.moved_bytes = 0
        """Sent or fetched so far."""
        self._records: dict[str, list[FileRecord]] = {}
        self._evaluations: dict[int | None, Mapping[str, float]] = {}

    def check_writable(self) -> None:
        """Write a file and remove it.

        Raises:
            MirrorError: it cannot be written.
        """
        self.store.put(_PROBE, [], _record_of(b""))
        self.store.remove([_PROBE])

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        return self._complete(self.store.sizes(CHECKPOINTS))

    # there --------------------------------------------------------------------------------------------------------

    def send(self, checkpoint: Path) -> None:
        """Copy a checkpoint, unless it is there; files of it that are there already are not sent again.

        Raises:
            MirrorError: it could not be written, or a file is not what the manifest says. What was sent does not count.
            CheckpointError: its manifest is damaged.
        """
        text, name = _text(checkpoint / MANIFEST), f"{CHECKPOINTS}/{checkpoint.name}"
        content = parse(text, str(checkpoint / MANIFEST))
        files, sealed = files_of(content), f"{name}/{MANIFEST}"
        there = self.store.sizes(CHECKPOINTS)
        is_whole = sealed in there and all(there.get(f"{name}/{file}") == record.bytes for file, record in files.items())
        if is_whole and self._read(sealed) == text.encode():
            return
        area = self.store.unfinished(name)
        self.store.remove(self._in_the_way(there, name, area, files))
        for file, record in files.items():
            target = f"{area}/{file}"
            if there.get(target) != record.bytes or not self.store.holds(target, record):
                self._put(checkpoint / file, target, record)
        self.store.put(f"{area}/{MANIFEST}", [text.encode()], _record_of(text.encode()))
        self.store.complete(name)
        self._evaluations[step_of(checkpoint.name)] = content["made"].get("evaluation", {})

    def remove_old(self, newest: int) -> None:
        """Remove what `keep` and `best` do not keep; the checkpoint of step `newest` was sent last, and stays."""
        if not self.keep:
            return
        there = self.store.sizes(CHECKPOINTS)
        steps = self._complete(there)
        steps_to_keep = {*steps[-self.keep :], self._best(steps), newest}
        for step in steps:
            if step not in steps_to_keep:
                folder = f"{CHECKPOINTS}/step_{step:06d}"
                others = [name for name in there if name.startswith(f"{folder}/") and name != f"{folder}/{MANIFEST}"]
                self.store.remove([f"{folder}/{MANIFEST}", *others])

    def send_records(self, run: Path) -> None:
        """Copy what the run has written besides checkpoints, where it has changed: files in its folder, and its pictures.

        Of a file of lines the whole lines are sent.
        """
        there = self.store.sizes("")
        pictures = run / MEDIA
        for path in sorted(pictures.iterdir()) if pictures.is_dir() else ():
            if _is_record(path) and there.get(f"{MEDIA}/{path.name}") != path.stat().st_size:
                self._put(path, f"{MEDIA}/{path.name}", _describe(path))
        described = {path.name: _describe(path) for path in sorted(run.iterdir()) if _is_record(path)}
        changed = {
            name: record
            for name, record in described.items()
            if self._records.get(name) != [record] or there.get(name) != record.bytes
        }
        if not changed:
            return
        for name, record in changed.items():  # until it has been put, either of them is right
            self._records[name] = [*(earlier for earlier in self._records.get(name, []) if earlier != record), record]
        index = render({"format": FORMAT, "records": {name: [*map(asdict, of)] for name, of in self._records.items()}}).encode()
        self.store.put(INDEX, [index], _record_of(index))
        for name, record in changed.items():
            self._put(run / name, name, record)
            self._records[name] = [record]

    # back ---------------------------------------------------------------------------------------------------------

    def holds_a_run(self) -> bool:
        """Return whether some run has sent anything here."""
        return INDEX in self.store.sizes("") or bool(self.steps())

    def open_index(self) -> None:
        """Read what is known of the records that are there.

        Raises:
            CheckpointError: `mirror.json` is damaged; nothing is known then.
        """
        self._records = {}
        if INDEX in self.store.sizes(""):
            content = parse(self._read_text(INDEX), self._called(INDEX))
            self._records = {name: [FileRecord(**fields) for fields in of] for name, of in content["records"].items()}

    def bring_back(self, checkpoints: CheckpointFolder, newer_than: int) -> tuple[Path | None, list[str]]:
        """Fetch the newest sound checkpoint of a step after `newer_than`, if there is one; and a sentence for each damaged one.

        Raises:
            MirrorError: the place cannot be read.
        """
        damaged: list[str] = []
        for step in reversed(self.steps()):
            if step <= newer_than:
                break
            if (fetched := self._fetched(step, checkpoints, damaged)) is not None:
                return fetched, damaged
        return None, damaged

    def bring_back_earlier(self, checkpoints: CheckpointFolder, fetched: int) -> list[str]:
        """Fetch what `keep` and `best` keep besides the checkpoint of step `fetched`, for rollbacks and for people.

        With all of them to be kept only the best is. Returns a sentence for each damaged one.
        """
        damaged: list[str] = []
        steps = self.steps()
        earlier = [step for step in steps if step < fetched]
        to_fetch = {*(earlier[1 - self.keep :] if self.keep > 1 else ()), self._best(steps)}
        for step in sorted(step for step in to_fetch if step in earlier):
            self._fetched(step, checkpoints, damaged)
        return damaged

    def bring_back_records(self, run: Path, *, but: tuple[str, ...] = ()) -> list[str]:
        """Fetch the records that the run's folder lacks, but those named `but`; returns a sentence for each damaged one."""
        there, damaged = self.store.sizes(""), []
        for name in there:
            path = PurePosixPath(name)
            is_record = name in self._records and name not in but
            is_picture = path.parent == PurePosixPath(MEDIA)
            if not (is_record or is_picture) or not _is_inside(name) or (run / name).exists():
                continue
            try:
                self._fetch(name, run / name, self._records[name] if is_record else [])
            except CheckpointError as error:
                damaged.append(str(error))
        return damaged

    def _fetched(self, step: int, checkpoints: CheckpointFolder, damaged: list[str]) -> Path | None:
        """The checkpoint, if it is sound; else `damaged` gets a sentence."""
        try:
            return self._fetch_checkpoint(step, checkpoints)
        except CheckpointError as error:
            damaged.append(str(error))
            return None
        finally:
            checkpoints.abandon(step)

    def _fetch_checkpoint(self, step: int, checkpoints: CheckpointFolder) -> Path:
        name = f"{CHECKPOINTS}/step_{step:06d}"
        text = self._read_text(f"{name}/{MANIFEST}")
        files = files_of(parse(text, self._called(f"{name}/{MANIFEST}")))
        there, folder = self.store.sizes(name), checkpoints.begin(step)
        for file, record in files.items():
            called = self._called(f"{name}/{file}")
            if not _is_inside(file):
                raise CheckpointError(f"'{called}' is not a file of a checkpoint, but {MANIFEST} names it")
            if f"{name}/{file}" not in there:
                raise CheckpointError(f"'{called}' is missing, but the checkpoint's {MANIFEST} names it")
            self._fetch(f"{name}/{file}", folder / file, [record])
        (folder / MANIFEST).write_text(text)
        return checkpoints.name_whole(step)

    def _fetch(self, name: str, path: Path, expected: list[FileRecord]) -> None:
        """Write a file to `path` if it is one of those `expected`; with none given, whatever it is."""
        part = path.with_name(f".{path.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, size = xxhash.xxh3_128(), 0
        try:
            with part.open("wb") as out:
                for block in self.store.blocks(name):
                    self._go_on()
                    out.write(block)
                    digest.update(block)
                    size += len(block)
                    self.moved_bytes += len(block)
                out.flush()
                os.fsync(out.fileno())
            if expected and FileRecord(size, digest.hexdigest()) not in expected:
                raise CheckpointError(f"'{self._called(name)}' is damaged: its checksum is not that of what was written")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _in_the_way(self, there: Mapping[str, int], name: str, area: str, files: Iterable[str]) -> list[str]:
        """Leftovers of aborted copies, and files that the checkpoint `name` is to replace in its `area`.

        What makes it count comes first.
        """
        complete = {f"{CHECKPOINTS}/step_{step:06d}" for step in self._complete(there)} - {area}
        new_files = {f"{area}/{file}" for file in files}
        left = [
            one
            for one in there
            if _COPY.match(one) and one not in new_files and "/".join(PurePosixPath(one).parts[:2]) not in complete
        ]
        return sorted(left, key=lambda one: one != f"{name}/{MANIFEST}")

    def _put(self, path: Path, name: str, record: FileRecord) -> None:
        with path.open("rb") as file:
            self.store.put(name, self._blocks(file, record), record)

    def _blocks(self, file: IO[bytes], record: FileRecord) -> Iterator[bytes]:
        """The first `record.bytes` of a file, piece by piece; raises before the last one if they are not the record's."""
        digest, left = xxhash.xxh3_128(), record.bytes
        while left:
            self._go_on()
            block = file.read(min(left, BLOCK))
            digest.update(block)
            left -= len(block)
            if not block or (not left and digest.hexdigest() != record.xxh3_128):
                raise MirrorError(f"'{file.name}' is damaged: its checksum is not that of what was written")
            self.moved_bytes += len(block)
            yield block

    def _complete(self, there: Mapping[str, int]) -> list[int]:
        places = (PurePosixPath(name) for name in there)
        steps = (step_of(path.parent.name) for path in places if path.name == MANIFEST and len(path.parts) == 3)
        return sorted(step for step in steps if step is not None)

    def _best(self, steps: Sequence[int]) -> int | None:
        return best_step({step: self._evaluation(step) for step in steps}, self.best) if self.best is not None else None

    def _evaluation(self, step: int) -> Mapping[str, float]:
        if step not in self._evaluations:
            name = f"{CHECKPOINTS}/step_{step:06d}/{MANIFEST}"
            with suppress(CheckpointError):  # of a damaged one nothing is known
                self._evaluations[step] = parse(self._read_text(name), self._called(name))["made"].get("evaluation", {})
        return self._evaluations.get(step, {})

    def _read(self, name: str) -> bytes:
        return b"".join(self.store.blocks(name))

    def _read_text(self, name: str) -> str:
        try:
            return self._read(name).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"'{self._called(name)}' is damaged: it cannot be read ({error!r})") from None

    def _called(self, name: str) -> str:
        return f"{self.store.address}/{name}"


def open_store(mirror: str, run_name: str) -> CopyStore:
    """The place of a run's copies in `run.mirror`, a folder or `s3://BUCKET/PREFIX`; nothing is read or written yet.

    Raises:
        ConfigError: the package that speaks to such a store is not installed, or its environment cannot be used.
    """
    if mirror.startswith("s3://"):
        return S3Store(mirror, run_name)
    return FolderStore(Path(mirror) / run_name)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path}' is damaged: it cannot be read ({error!r})") from None


def _is_record(path: Path) -> bool:
    """Links, hidden files, those that are being written, and the name of the process that owns the folder are none."""
    if path.name.startswith(".") or path.suffix == ".part" or path.name in (INDEX, owner.FILE):
        return False
    return is_own_file(path)


def _describe(path: Path) -> FileRecord:
    """Size and checksum of a file; of a file of lines, which grows meanwhile, up to the end of its last whole line."""
    digest, size = xxhash.xxh3_128(), 0
    rest = b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            block, rest = rest + block, b""
            if path.suffix == ".jsonl":
                end = block.rfind(b"\n") + 1
                block, rest = block[:end], block[end:]
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def _record_of(content: bytes) -> FileRecord:
    return FileRecord(len(content), xxhash.xxh3_128_hexdigest(content))


def _is_inside(name: str) -> bool:
    """Return whether a name from elsewhere stays below the folder that it is joined to."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
