"""Child processes that judge answers for a verifier: as many as the cores, started when needed, killed when one hangs
or when nobody holds their pool any more.

The parent pickles what it asks and reads numbers from 0 to 1 back; nothing a child says is evaluated here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import queue
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.errors import RewardError
from megarl.rewards.scorer import Verdict

_START_DEADLINE_S = 120.0
_END_S = 10.0
"""For a child that has closed its output to be gone."""
_FORK_S = 2.0
"""Given to a child, on top of an answer's own seconds, to notice that they are over; at most a tenth of what is left."""
_ANSWERS_PER_CHILD = 64
"""Another child is started for every so many answers of one call; starting one takes about a second."""


_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "HOME")
"""Variables of the environment that an interpreter may need to start. Keys and tokens are not handed on."""

Question = tuple[tuple[Any, ...], str]
"""The row's side (the arguments of a judge's first half) and the answer."""


class ChildPool:
    """The children of the verifier called `kind` (see `judges.py`). One call of `judge` at a time."""

    def __init__(self, kind: str, timeout_s: float) -> None:
        """`timeout_s` is given to one answer; one that takes longer is not judged."""
        self.kind, self.timeout_s = kind, timeout_s
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._children = 0

    def judge(self, questions: Sequence[Question], until: float) -> list[Verdict]:
        """A verdict per question, in order; equal questions are judged once. None: not judged, or not in time.

        Raises:
            RewardError: the children do not start.
        """
        texts = [base64.b64encode(pickle.dumps(question)).decode() for question in questions]
        different = list(dict.fromkeys(texts))
        needed = min(len(os.sched_getaffinity(0)), 1 + len(different) // _ANSWERS_PER_CHILD)
        while self._children < needed:
            self._idle.put(_Child(self.kind))
            self._children += 1

        def judge(text: str) -> Verdict:
            child = self._idle.get()
            try:
                return child.judge(text, self.timeout_s, until)
            finally:
                self._idle.put(child)

        with ThreadPoolExecutor(needed) as threads:
            verdicts = dict(zip(different, threads.map(judge, different), strict=True))
        return [verdicts[text] for text in texts]


class _Child:
    """One child process; started when needed, killed when it does not answer. It ends by itself when its input closes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_until = 0.0
        """When a process that starts must have said that it is ready; 0: it has."""
        self._was_killed = False
        """Whether somebody else, such as a machine out of memory, killed it over the last question."""

    def judge(self, question: str, timeout_s: float, until: float) -> Verdict:
        if not self._is_ready(until):
            return None
        now = time.monotonic()
        notices_s = min(_FORK_S, (until - now) / 10)
        ends = min(now + timeout_s, until - notices_s)
        answer = self._try(question, ends, notices_s)
        if self._was_killed and self._is_ready(until):
            answer = self._try(question, ends, notices_s)
        return _verdict(answer)

    def _try(self, question: str, ends: float, notices_s: float) -> str | None:
        self._was_killed = False
        left_s = ends - time.monotonic()
        return self._ask(json.dumps([question, left_s]), left_s + notices_s) if left_s > 0 else None

    def _is_ready(self, until: float) -> bool:
        """Return whether there is a process that answers; one that is still starting at `until` is kept for the next call."""
        if self._process is None:
            self._start()
        if self._ready_until:
            line = self._read_line(max(min(self._ready_until, until) - time.monotonic(), 0))
            if line is None and time.monotonic() < self._ready_until:
                return False
            if line != "ready":
                self._kill()
                raise RewardError(
                    f"reward '{self.kind}': its process did not start within {_START_DEADLINE_S:.0f} s; "
                    f"try `{sys.executable} -P {_program()} {self.kind}`, which should say 'ready'"
                )
            self._ready_until = 0.0
        return time.monotonic() < until

    def _start(self) -> None:
        self._ready_until = time.monotonic() + _START_DEADLINE_S
        self._process = process = subprocess.Popen(
            # -P: this folder must not become an import path
            [sys.executable, "-P", str(_program()), self.kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        # Without it a process that nobody asks any more lives as long as this one: Python keeps a `Popen` whose process has not
        # ended, and with it the pipe that would have to close.
        self._end = weakref.finalize(self, _end, process)

    def _ask(self, line: str, timeout_s: float) -> str | None:
        """The child's answer, or None after seeing off a child that died or does not answer in time."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read_line(timeout_s)
        except BrokenPipeError:
            answer = ""
        self._was_killed = answer == "" and self._exit_code() == -signal.SIGKILL
        if not answer:
            self._kill()
        return answer or None

    def _exit_code(self) -> int | None:
        """Exit code of a child whose output is closed, or None if it is still running."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        return None

    def _read_line(self, timeout_s: float) -> str | None:
        """A line, empty if the child is gone, None if there is none in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        # An answer is one short line written at once, so the first read of the pipe has all of it.
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return None
        line = os.read(self._process.stdout.fileno(), 64)
        return line.decode().strip()

    def _kill(self) -> None:
        self._end()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what was still to be written
            pipe.close()


def _program() -> Path:
    return Path(__file__).with_name("judge_child.py")


def _environment() -> dict[str, str]:
    """This process's variables without what a child has no use for, and one thread per child for linear algebra."""
    variables = {name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES or name.startswith("OPENBLAS_")}
    return variables | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _verdict(text: str | None) -> Verdict:
    """The number from 0 to 1 that `text` is, else None."""
    with contextlib.suppress(ValueError, TypeError):
        verdict = float(text)  # type: ignore[arg-type]
        if 0 <= verdict <= 1:
            return verdict
    return None
