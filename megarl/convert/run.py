"""A plan carried out: workers take the tasks that are left, the journal notes what is done, the folder gets its name."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from megarl.convert.blocks import Files, Reader, extent_checksum, run_task, target_extents
from megarl.convert.journal import Journal
from megarl.convert.plan import ConversionPlan, gib
from megarl.errors import CheckpointError
from megarl.system.process_exit import end_with_parent

_SPARE_BYTES = 64 * 2**20
"""Bytes that must be free beyond the tensors' own: metadata, tokenizer, journal."""


@dataclass(frozen=True)
class ConversionResult:
    """The result of a command. `finished`: the target is complete; else `waiting_for` shards have not finished yet."""

    bytes_written: int
    bytes_kept: int
    seconds: float
    finished: bool
    waiting_for: tuple[int, ...] = ()


def run_plan(
    plan: ConversionPlan,
    target: Path,
    *,
    workers: int = 1,
    shard: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] | None = None,
) -> ConversionResult:
    """Carry out shard `shard` = (index, count) of a plan; the command that finds all shards done completes `target`.

    `progress` is told (bytes done, bytes in all). An interrupted conversion leaves what it has beside `target`; the same call
    continues it.

    Raises:
        CheckpointError: the target exists, the disk is full, a worker died, or an earlier conversion was another one.
    """
    started = time.monotonic()
    journal = Journal(plan, target, *shard)
    with journal.opened(), _disk_errors(journal.staging):
        shard_tasks = journal.mine()
        _check_space(plan, journal.staging)
        _make_files(plan, shard_tasks, journal.staging)
        finished_tasks = _still_there(plan, journal)
        left = [number for number in shard_tasks if number not in finished_tasks]
        total, done = sum(plan.tasks[n].nbytes for n in shard_tasks), sum(plan.tasks[n].nbytes for n in finished_tasks)

        def tick(nbytes: int) -> None:
            journal.beat()
            if progress is not None:
                progress(done + nbytes, total)

        for number, checksums in _completed(plan, left, journal.staging, workers, tick):
            journal.add(number, checksums)
        journal.finish()
        missing = tuple(journal.missing_shards()) if journal.staging.exists() else ()
    return ConversionResult(total - done, done, time.monotonic() - started, finished=not missing, waiting_for=missing)


def _completed(
    plan: ConversionPlan, numbers: Sequence[int], staging: Path, workers: int, tick: Callable[[int], None]
) -> Iterator[tuple[int, list[str]]]:
    """(task, checksums) of each task, as it is finished."""
    # the kernel lets one process at a time write into a file
    workers = min(workers, len({_first_file(plan, number) for number in numbers}))
    if workers <= 1:
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            tick(done)

        with closing(Files(plan.source.path, os.O_RDONLY)) as sources, closing(Files(staging, os.O_WRONLY)) as files:
            reader = Reader(sources)
            for number in numbers:
                yield number, run_task(plan.tasks[number], reader, files, count)
        return
    yield from _completed_by_workers(plan, _file_by_file(plan, numbers), staging, workers, tick)


def _file_by_file(plan: ConversionPlan, numbers: Sequence[int]) -> list[int]:
    """The tasks in an order in which neighbours write into different files, and each file is written from its start on."""
    of_file: dict[str, list[int]] = {}
    for number in numbers:
        of_file.setdefault(_first_file(plan, number), []).append(number)
    return [number for round_ in zip_longest(*of_file.values()) for number in round_ if number is not None]


def _first_file(plan: ConversionPlan, number: int) -> str:
    return plan.tasks[number].target.extents[0].file


def _completed_by_workers(
    plan: ConversionPlan, numbers: Sequence[int], staging: Path, workers: int, tick: Callable[[int], None]
) -> Iterator[tuple[int, list[str]]]:
    # forked before any thread is started, so that the plan is shared and nothing is imported again
    context = multiprocessing.get_context("fork")
    turn, done = context.Value("q", 0), context.Value("q", 0)
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(workers):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(plan, numbers, staging, turn, done, sender), daemon=True)
            process.start()
            sender.close()
            processes[receiver] = process
        while processes:
            for connection in wait(list(processes), timeout=0.2):
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except EOFError:
                    process = processes.pop(connection)
                    process.join()
                    if process.exitcode:
                        raise CheckpointError(_death(process.exitcode)) from None
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
            tick(done.value)
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _work(plan: ConversionPlan, numbers: Sequence[int], staging: Path, turn: Any, done: Any, connection: Connection) -> None:
    """A worker: the next task that nobody has taken, until there is none."""
    end_with_parent()  # a killed command leaves nobody who writes
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)

    def count(nbytes: int) -> None:
        with done.get_lock():
            done.value += nbytes

    reader, files = Reader(Files(plan.source.path, os.O_RDONLY)), Files(staging, os.O_WRONLY)
    try:
        while True:
            with turn.get_lock():
                at = turn.value
                turn.value += 1
            if at >= len(numbers):
                return
            connection.send((numbers[at], run_task(plan.tasks[numbers[at]], reader, files, count)))
    except Exception as error:  # noqa: BLE001  (told to the parent, which raises it)
        connection.send(error)


def _death(exit_code: int) -> str:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"a worker was killed by {name}; the same command continues where it stopped (memory? try fewer --workers)"
    return f"a worker ended with exit code {exit_code}; the same command continues where it stopped"


def _make_files(plan: ConversionPlan, numbers: Sequence[int], staging: Path) -> None:
    """Make every file in its final size, and write the headers of this shard's tasks."""
    for name, size in plan.files.items():
        with (staging / name).open("ab") as file:
            file.truncate(size)
    with closing(Files(staging, os.O_WRONLY)) as files:
        for number in numbers:
            for name, offset, content in plan.fixed[number]:
                files.write(name, content, offset)


def _still_there(plan: ConversionPlan, journal: Journal) -> set[int]:
    """Tasks that the journal calls finished and whose bytes are on disk as they were written."""
    intact = set()
    with closing(Files(journal.staging, os.O_RDONLY)) as files:
        for number, checksums in journal.done().items():
            journal.beat()
            on_disk = [extent_checksum(files, extent, itemsize) for _, extent, itemsize in target_extents(plan.tasks[number])]
            if on_disk == checksums:
                intact.add(number)
    return intact


def _check_space(plan: ConversionPlan, staging: Path) -> None:
    there = sum((staging / name).stat().st_blocks * 512 for name in plan.files if (staging / name).exists())
    needed, free = plan.bytes_written + _SPARE_BYTES - there, shutil.disk_usage(staging).free
    if needed > free:
        raise CheckpointError(
            f"the disk of '{staging.parent}' has {gib(free)} free, but the conversion needs {gib(needed)} more"
        )


@contextmanager
def _disk_errors(staging: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(
                f"writing to '{staging}' failed: {error.strerror}; make room and run the same command again to continue, or "
                "remove that folder"
            ) from None
        raise CheckpointError(f"reading or writing failed: {error}; the same command continues where it stopped") from None
