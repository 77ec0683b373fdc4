"""`math_verify`: 1 if math-verify finds the response's final answer equal to the gold answer, else 0.

Answers are judged in child processes that end when one takes too long, so no response can stop a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.config.schema import DataConfig
from megarl.data.sample import Sample
from megarl.errors import RewardError
from megarl.rewards.scorer import Verdict, gold_answer

_START_DEADLINE_S = 120.0
_ANSWERS_PER_CHILD = 64
"""Another child is started for every so many answers of one call; starting one takes about a second."""


class MathVerify:
    """The verifier over rows with a mathematical gold answer: a number, a formula, LaTeX, or text that contains one."""

    def __init__(self, data: DataConfig, *, timeout_s: float = 5.0) -> None:
        """`timeout_s` is given to one answer; one that takes longer is not judged, which is counted like a failure."""
        self.answer_key, self.timeout_s = data.answer_key, timeout_s
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._children = 0

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """1.0 or 0.0, or None where the gold answer cannot be parsed or judging took too long."""
        pairs = [(str(gold_answer(sample, self.answer_key, "math_verify")), sample.response_text) for sample in samples]
        different = list(dict.fromkeys(pairs))
        wanted = min(len(os.sched_getaffinity(0)), 1 + len(different) // _ANSWERS_PER_CHILD)
        while self._children < wanted:
            self._idle.put(_Child())
            self._children += 1

        def judge(pair: tuple[str, str]) -> Verdict:
            child = self._idle.get()
            try:
                timeout_s = min(self.timeout_s, until - time.monotonic())
                return child.judge(*pair, timeout_s=timeout_s) if timeout_s > 0 else None
            finally:
                self._idle.put(child)

        with ThreadPoolExecutor(wanted) as threads:
            verdicts = dict(zip(different, threads.map(judge, different), strict=True))
        return [verdicts[pair] for pair in pairs]


class _Child:
    """One child process; started when needed, killed when it does not answer. It ends by itself when its input closes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, gold: str, response: str, *, timeout_s: float) -> Verdict:
        if self._process is None:
            self._start()
        answer = self._ask(json.dumps([gold, response, timeout_s]), timeout_s + 1)  # the child ends itself first
        return None if answer is None else {"true": 1.0, "false": 0.0, "null": None}[answer]

    def _start(self) -> None:
        program = Path(__file__).with_name("math_child.py")
        self._process = subprocess.Popen(
            # -P: this folder must not become an import path
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._read_line(_START_DEADLINE_S) != "ready":
            self._kill()
            raise RewardError(
                f"reward 'math_verify': its process did not start within {_START_DEADLINE_S:.0f} s; "
                f"try `{sys.executable} -P {program}`, which should say 'ready'"
            )

    def _ask(self, line: str, timeout_s: float) -> str | None:
        """The child's answer, or None after killing a child that died or does not answer in time."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read_line(timeout_s)
        except BrokenPipeError:
            answer = None
        if answer is None:
            self._kill()
        return answer

    def _read_line(self, timeout_s: float) -> str | None:
        assert self._process is not None
        assert self._process.stdout is not None
        # An answer is one short line written at once, so the first read of the pipe has all of it.
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return None
        line = os.read(self._process.stdout.fileno(), 64)
        return line.decode().strip() or None

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was still to be written
                pipe.close()
        self._process = None
