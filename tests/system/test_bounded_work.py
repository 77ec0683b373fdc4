"""Work of others is ended by its bounds in whatever thread it runs, and what is within them is left alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from functools import partial

import pytest

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


def test_work_that_ends_just_then_leaves_nothing_behind() -> None:
    """The exception that ends work must not come when the work has ended already."""
    for wait_ms in range(60):
        wait_s = wait_ms / 2000
        with contextlib.suppress(BoundReachedError):
            assert bounded(partial(time.sleep, wait_s), time_s=0.01, more_bytes=1 << 34) is None
        sum(range(1000))


def test_a_fork_has_a_watch_of_its_own() -> None:
    bounded(lambda: 1, time_s=60, more_bytes=1 << 30)
    child = multiprocessing.get_context("fork").Process(target=_in_fork)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def _in_fork() -> None:
    with pytest.raises(BoundReachedError):
        bounded(_endless, time_s=0.1, more_bytes=1 << 34)
