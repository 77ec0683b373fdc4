"""Work of others is ended by its bounds in whatever thread it runs, and what is within them is left alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from megarl.system import bounded_work
from megarl.system.bounded_work import BoundReachedError, bounded


def _endless() -> None:
    while True:
        with contextlib.suppress(Exception):  # which work of others may have
            sum(range(100))


def test_work_within_its_bounds_gives_its_result_and_its_error() -> None:
    assert bounded(lambda: 7, time_s=60, more_bytes=1 << 30) == 7
    with pytest.raises(KeyError, match="own"):
        bounded(lambda: {}["own"], time_s=60, more_bytes=1 << 30)


def test_work_without_an_end_is_ended_in_every_thread() -> None:
    ended: list[str] = []

    def work() -> None:
        try:
            bounded(_endless, time_s=0.2, more_bytes=1 << 34)
        except BoundReachedError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join(60)
    assert ended == ["took more than 0.2 s"] * 4


def test_work_that_grows_is_ended() -> None:
    kept: list[bytes] = []
    with pytest.raises(BoundReachedError, match="took more than 64 MiB of memory"):
        bounded(lambda: [kept.append(b"x" * (1 << 20)) for _ in range(100_000)], time_s=120, more_bytes=64 << 20)


def test_work_that_ends_while_its_bound_is_looked_at_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, is_back = threading.Event(), threading.Event()

    def reached(work: bounded_work._Work) -> str:
        if time.monotonic() <= work.ends_at or looks.is_set():
            return ""
        looks.set()
        is_back.wait(1)  # the work is to end meanwhile, and waits for nothing that the watch holds
        return "time"

    monkeypatch.setattr(bounded_work, "_reached", reached)
    with contextlib.suppress(BoundReachedError):
        bounded(lambda: looks.wait(60), time_s=0.0, more_bytes=1 << 34)
    is_back.set()
    others: list[int] = []
    other = threading.Thread(target=lambda: others.append(bounded(lambda: 7, time_s=60, more_bytes=1 << 34)), daemon=True)
    other.start()
    other.join(10)
    assert others == [7]


def test_work_that_ends_while_it_is_being_ended_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception must not come when the work's thread is at something else."""
    works: list[bounded_work._Work] = []
    raises, raise_in, reached = threading.Event(), bounded_work._raise_in, bounded_work._reached
    monkeypatch.setattr(bounded_work, "_reached", lambda work: works.append(work) or reached(work))

    def raise_late(thread: int, error: type[BaseException] | None) -> None:
        if error is not None:
            raises.set()
            while not works[0].is_over:
                time.sleep(0.01)
        raise_in(thread, error)

    monkeypatch.setattr(bounded_work, "_raise_in", raise_late)
    with pytest.raises(BoundReachedError, match="took more than 0 s"):
        bounded(lambda: raises.wait(60), time_s=0.0, more_bytes=1 << 34)


def test_an_end_that_comes_behind_the_work_is_taken_back() -> None:
    """The exception that ends work waits for the thread's next operation, and by then the work may have ended by itself."""
    told: list[bytes] = []
    reader, writer = os.pipe()
    thread = threading.Thread(target=lambda: told.append(os.read(reader, 1)))
    thread.start()
    assert thread.ident is not None
    while not Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().startswith(("0 ", "63 ")):  # it reads
        time.sleep(0.01)
    work = bounded_work._Work(thread.ident, 0.0, 0, bound="time", is_told=True)
    bounded_work._raise_in(thread.ident, bounded_work._Ended)
    work.end()
    os.write(writer, b"x")
    thread.join(60)
    for end in (reader, writer):
        os.close(end)
    assert told == [b"x"]


def test_a_fork_has_a_watch_of_its_own() -> None:
    bounded(lambda: 1, time_s=60, more_bytes=1 << 30)
    child = multiprocessing.get_context("fork").Process(target=_in_fork)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def _in_fork() -> None:
    with pytest.raises(BoundReachedError):
        bounded(_endless, time_s=0.1, more_bytes=1 << 34)
