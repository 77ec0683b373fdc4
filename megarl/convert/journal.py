"""The progress of a conversion: a folder beside the target that becomes it at the end, and a journal in it.

The folder is hidden and lacks what makes a checkpoint one, so nothing half-written looks complete. The journal's first line
states what is being made from what; a command that says otherwise does not continue it. Every further line is a finished task.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from megarl.convert.plan import ConversionPlan
from megarl.errors import CheckpointError
from megarl.observe.kept_lines import cut_torn_end
from megarl.runs.owner import Claim, take_target

OWN = ("journal-*", "owner-*", ".owner-*")
"""Files that are no part of the target."""
_WAIT_S = 10.0
"""How long the journal of a killed command may stay locked: until its worker processes have noticed."""


class Journal:
    """The part of a conversion that one command does: shard `index` of `count`. Use `opened`."""

    def __init__(self, plan: ConversionPlan, target: Path, index: int, count: int) -> None:
        self.plan, self.target, self.index, self.count = plan, target, index, count
        self.staging = target.with_name(f".{target.name}.converting")
        self.header = {"plan": fingerprint(plan), "shards": count, "kind": plan.kind, "source": str(plan.source.path.resolve())}
        self.claim: Claim | None = None
        self._file: TextIO | None = None

    @contextmanager
    def opened(self) -> Iterator[Journal]:
        """Hold this shard's journal, made if it is not there; no other command may hold it meanwhile.

        Raises:
            OwnerError: another command is writing this shard.
            CheckpointError: the target exists, or the folder holds another conversion.
        """
        refuse_existing(self.target)
        shard = f"shard {self.index} of {self.count} of '{self.target}'"
        self.claim = take_target(self.staging / f"owner-{self.index}-of-{self.count}.json", shard)
        try:
            with self._held(shard):
                yield self
        finally:
            self.claim.release()
            self.claim = None

    @contextmanager
    def _held(self, shard: str) -> Iterator[None]:
        """Lock the journal as well: worker processes of a command that was killed hold it until they end."""
        with _locked(self.path(self.index), shard, _WAIT_S) as file:
            self._file = file
            refuse_existing(self.target)
            cut_torn_end(self.path(self.index))  # of a command that was killed
            for journal in self.staging.glob("journal-*"):
                self._check_header(journal)
            if not self._lines(self.index):
                file.truncate(0)
                self._write(self.header)
            yield
        self._file = None

    def beat(self) -> None:
        """Show others that this command is alive; called often.

        Raises:
            OwnerError: another one has taken the shard over.
        """
        if self.claim is not None:
            self.claim.beat()

    def done(self, index: int | None = None) -> dict[int, list[str]]:
        """Checksums of what each finished task wrote, by the task's number; of this shard, or of shard `index`."""
        lines = self._lines(self.index if index is None else index)
        return {line["task"]: line["xxh3_64"] for line in lines[1:]}

    def add(self, task: int, checksums: list[str]) -> None:
        """Note a finished task."""
        self._write({"task": task, "xxh3_64": checksums})

    def mine(self) -> list[int]:
        """Numbers of this shard's tasks: an even share of the bytes, in order."""
        return shard_of(self.plan, self.index, self.count)

    def missing_shards(self) -> list[int]:
        """Shards that have not finished all their tasks."""
        return [i for i in range(self.count) if set(shard_of(self.plan, i, self.count)) - self.done(i).keys()]

    def finish(self) -> bool:
        """Complete the folder and give it its name, if all shards are done; whether it was this command that did.

        Raises:
            OSError: the disk is full.
        """
        if self.missing_shards():
            return False
        with _locked(self.staging / "finish.lock", f"the end of '{self.target}'", 600.0):
            if not self.staging.exists():  # another shard was faster
                return False
            named: dict[str, str] = {}
            for shard in range(self.count):
                for task, checksums in self.done(shard).items():
                    named |= dict(zip(self.plan.tasks[task].names, checksums, strict=True))
            self.plan.finish(self.staging, {name: named[name] for task in self.plan.tasks for name in task.names})
            for leftover in (*(path for own in OWN for path in self.staging.glob(own)), self.staging / "finish.lock"):
                leftover.unlink(missing_ok=True)
            self.staging.replace(self.target)
        return True

    def path(self, index: int) -> Path:
        """The journal of a shard."""
        return self.staging / f"journal-{index}-of-{self.count}.jsonl"

    def _lines(self, index: int) -> list[Any]:
        """The journal's whole lines; a kill may have cut the last one short."""
        path = self.path(index)
        if not path.exists():
            return []
        lines = []
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        return lines

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None, "use it inside `opened`"
        self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _check_header(self, path: Path) -> None:
        first = path.read_text().partition("\n")[0]
        try:
            stored_header = json.loads(first)
        except ValueError:
            return  # another shard is writing its first line just now, or was killed before it could
        for name, what in (("kind", "conversion"), ("source", "source"), ("shards", "number of shards")):
            if stored_header.get(name) != self.header[name]:
                raise CheckpointError(
                    f"'{self.staging}' holds an unfinished conversion whose {what} is {stored_header.get(name)!r}, but this "
                    f"command's is {self.header[name]!r}; finish that one first, or remove the folder"
                )
        if stored_header != self.header:
            raise CheckpointError(
                f"'{self.staging}' holds an unfinished conversion with other options, or whose source has changed since; "
                "finish it with the same command and source, or remove the folder"
            )


def fingerprint(plan: ConversionPlan) -> str:
    """A fingerprint of what decides a conversion's bytes: source files with sizes and times, config, options and the
    places of all tensors."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in plan.source.files()]
    places = [(task.target.name, [(e.file, e.offset, e.row, e.col) for e in task.target.extents]) for task in plan.tasks]
    content = json.dumps([plan.kind, files, plan.source.hf_config, plan.options, plan.files, places], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def shard_of(plan: ConversionPlan, index: int, count: int) -> list[int]:
    """Numbers of the tasks of shard `index` of `count`: those whose middle byte lies in its share."""
    total = sum(task.nbytes for task in plan.tasks)
    numbers, at = [], 0
    for number, task in enumerate(plan.tasks):
        if (2 * at + task.nbytes) * count // max(1, 2 * total) == index:
            numbers.append(number)
        at += task.nbytes
    return numbers


def refuse_existing(target: Path) -> None:
    """Raise CheckpointError if something is where a conversion is to go."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"'{target}' exists already; name a new or an empty folder")


@contextmanager
def _locked(path: Path, what: str, wait_s: float) -> Iterator[TextIO]:
    with path.open("a+") as file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(f"another command is at work on {what}; wait for it, or end it") from None
                time.sleep(0.1)
        yield file
