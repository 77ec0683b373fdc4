"""Children that judge answers are killed from outside: their answers are judged all the same."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection

import psutil

from megarl.rewards.sandbox.judge_pool import ChildPool

SLOW = (("(a+)+$",), "a" * 24 + "b")
"""A pattern and a text over which Python's `re` thinks for seconds."""


def children(earlier: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """This process's, without those of other tests' pools."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # others end meanwhile
            if child not in earlier and "judge_child.py" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_a_child_that_is_killed_is_replaced_and_its_answer_is_judged() -> None:
    earlier = children()
    pool = ChildPool("format_regex", timeout_s=30)
    assert pool.judge([(("a+",), "aaa"), (("a+",), "b")], time.monotonic() + 60) == [1.0, 0.0]
    [idle] = children(earlier)
    idle.kill()
    assert pool.judge([(("a+",), "aa")], time.monotonic() + 60) == [1.0]

    verdicts: list[float | None] = []
    asking = threading.Thread(target=lambda: verdicts.extend(pool.judge([SLOW], time.monotonic() + 60)))
    asking.start()
    time.sleep(0.3)
    [busy] = children(earlier)
    assert busy.pid != idle.pid
    assert asking.is_alive(), "the pattern is too fast for this test"
    busy.kill()
    asking.join(60)
    assert verdicts == [0.0]


def test_an_answer_that_takes_its_child_too_long_is_not_judged_again() -> None:
    pool = ChildPool("format_regex", timeout_s=0.5)
    pool.judge([(("a",), "a")], time.monotonic() + 60)
    began = time.monotonic()
    assert pool.judge([(("(a+)+$",), "a" * 40 + "b")], time.monotonic() + 60) == [None]
    assert time.monotonic() - began < 3
