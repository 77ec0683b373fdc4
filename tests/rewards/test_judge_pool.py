"""Children that judge answers are killed from outside: their answers are judged all the same."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from megarl.rewards.sandbox import judge_pool
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


def test_a_child_that_hangs_is_not_waited_for_beyond_the_deadline() -> None:
    earlier = children()
    pool = ChildPool("format_regex", timeout_s=30)
    pool.judge([(("a",), "a")], time.monotonic() + 60)
    [idle] = children(earlier)
    idle.suspend()
    began = time.monotonic()
    assert pool.judge([(("a",), "aa")], time.monotonic() + 1) == [None]
    assert time.monotonic() - began < 2
    assert pool.judge([(("a+",), "aa")], time.monotonic() + 60) == [1.0]


def test_children_end_with_the_last_holder_of_their_pool() -> None:
    earlier = children()
    pool = ChildPool("format_regex", timeout_s=30)
    pool.judge([(("a",), "a")], time.monotonic() + 60)
    assert len(children(earlier)) == 1
    del pool
    gc.collect()
    assert children(earlier) == []


SLOW_TO_START = """
import sys, time
time.sleep(3)
print("ready", flush=True)
for line in sys.stdin:
    print("1.0", flush=True)
"""


def test_a_child_that_starts_slowly_is_not_waited_for_beyond_the_deadline_and_serves_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "judge_child.py").write_text(SLOW_TO_START)
    monkeypatch.setattr(judge_pool, "__file__", str(tmp_path / "judge_pool.py"))
    earlier = children()
    pool = ChildPool("format_regex", timeout_s=30)
    began = time.monotonic()
    assert pool.judge([(("a",), "a")], time.monotonic() + 0.5) == [None]
    assert time.monotonic() - began < 2
    starting = children(earlier)
    assert pool.judge([(("a",), "a")], time.monotonic() + 60) == [1.0]
    assert children(earlier) == starting, "it was started again"
