"""Runs a Python program that a model wrote in a process that can do nothing but compute, and ends it on time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import RewardError

_START_S = 10.0
"""Given to the interpreter to start and shut itself in, on top of the program's own seconds."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run."""

    timeout_s: float = 10.0
    """Wall-clock seconds of the program; its CPU seconds are limited to one more."""
    memory_bytes: int = 1 << 30
    """Address space."""
    output_bytes: int = 1 << 20
    """Most bytes that it may print; a program that prints more is ended."""


class OutOfTimeError(Exception):
    """A program has used all its seconds."""


def run_program(code: str, stdin: str, limits: SandboxLimits, until: float) -> str | None:
    """What `code` prints, given `stdin`; None if it fails, is ended by another limit than time, or prints no UTF-8.

    Raises:
        OutOfTimeError: it did not end within its seconds.
        RewardError: the sandbox cannot be had on this machine.
        TimeoutError: `until` (in `time.monotonic()`) passed before the program had its time.
    """
    with _child("program_child.py", {"code": code, "channel": None, "input": stdin}, limits) as process:
        began = time.monotonic()
        output, status = _supervise(process, limits, until)
        took_s = time.monotonic() - began
    used_up = status in (-signal.SIGKILL, -signal.SIGXCPU)  # with several threads its CPU seconds end first
    if used_up or (output is None and took_s >= limits.timeout_s):
        raise OutOfTimeError
    if output is None or status != 0:
        return None
    try:
        return output.decode()
    except UnicodeDecodeError:
        return None


def run_tests(code: str, tests: Sequence[str], limits: SandboxLimits, until: float) -> int:
    """Number of `tests` passed by `code`, which runs in a process of its own; 0 if they are ended before all have run.

    Raises as `run_program`.
    """
    with contextlib.ExitStack() as left:
        ends = [left.enter_context(open(end, "rb", buffering=0)) for _ in range(2) for end in os.pipe()]
        from_tests, to_program, from_program, to_tests = (end.fileno() for end in ends)
        program: dict[str, object] = {"code": code, "channel": [from_tests, to_tests], "input": ""}
        judge: dict[str, object] = {"tests": list(tests), "channel": [from_program, to_program]}
        left.enter_context(_child("program_child.py", program, limits, [from_tests, to_tests]))
        process = left.enter_context(_child("tests_child.py", judge, limits, [from_program, to_program]))
        for end in ends:  # the two processes have them now
            end.close()
        output, _ = _supervise(process, limits, until)
    report = output or b""
    return min(int(report), len(tests)) if re.fullmatch(rb"\d{1,6}\n", report) else 0


@contextlib.contextmanager
def _child(
    name: str, request: dict[str, object], limits: SandboxLimits, ends: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this folder's program `name`, which is asked `request` and ended with the block; `ends` stay open in it."""
    request = {**request, "memory_bytes": limits.memory_bytes, "cpu_s": math.ceil(limits.timeout_s) + 1}
    program = Path(__file__).with_name(name)
    with tempfile.TemporaryDirectory(prefix="megarl-sandbox-") as empty, tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(program)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=empty,
            env={},
            start_new_session=True,
            pass_fds=ends,
        )
        assert process.stdout is not None
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own group, made by start_new_session
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def _supervise(process: subprocess.Popen[bytes], limits: SandboxLimits, until: float) -> tuple[bytes | None, int]:
    """What the process writes after its first line (None: ended by a limit), until its end, a limit or `until`; its status.

    The program's seconds start when the process says that it is shut in.
    """
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    output, ready = b"", False
    deadline = time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while selector.select(max(min(deadline, until) - time.monotonic(), 0)):
            chunk = os.read(pipe, 1 << 16)
            output += chunk
            if not ready and (b"\n" in output or not chunk):
                first, _, output = output.partition(b"\n")
                _must_be_ready(first)
                ready, deadline = True, time.monotonic() + limits.timeout_s
            if len(output) > limits.output_bytes:
                return None, 1
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):  # it closed its output and goes on
                    return output, process.wait(max(min(deadline, until) - time.monotonic(), 0))
                break
    if deadline >= until:
        raise TimeoutError
    if not ready:
        raise RewardError(f"the sandbox did not start within {_START_S:.0f} s")
    return None, 1


def _must_be_ready(line: bytes) -> None:
    if line != b"ready":
        reason = line.decode(errors="replace").removeprefix("missing: ") or "its process ended before it was shut in"
        raise RewardError(f"programs of a model cannot be run safely on this machine: {reason}")
