"""The program of a verifier's child process, which judges text that a model wrote. Run by path: it imports nothing of megarl.

Each answer is judged in a fork of this process that is confined before it sees the answer, and that ends with it: no answer
can reach another one's verdict, a file, a process or the network, however the verifier evaluates it.
In: the kind of verifier as argument, then lines of JSON `[base64 of the pickled question, timeout_s]`, where a question is
`(what the row says, the answer)`. Out: `ready`, then a line per question, a number or `null` (cannot be judged).
"""

from __future__ import annotations

import base64
import ctypes
import json
import logging
import math
import os
import pickle
import resource
import select
import signal
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable

MEMORY_BYTES = 4 << 30
PREPARED = 4096
"""Rows whose judge is kept ready."""
VERDICT = 3
"""The one file that a fork has open besides the standard ones: where its verdict goes, eight bytes."""
_PR_SET_PDEATHSIG = 1

PreparedJudge = Callable[[str], float | None]
"""A `judges.Judge`, which this file cannot import before the kind of verifier is known."""


def main(kind: str) -> None:
    """Answer until the input ends."""
    import confinement  # noqa: F401 - loaded here, once for all forks
    import vetted_eval  # noqa: F401
    from judges import JUDGES

    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull, "r+") as nothing:  # what a library prints must not look like an answer
        for standard in (0, 1, 2):
            os.dup2(nothing.fileno(), standard)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    sys.dont_write_bytecode = True
    prepare = JUDGES[kind]()
    prepared: OrderedDict[bytes, PreparedJudge] = OrderedDict()
    print("ready", file=answers, flush=True)
    for line in questions:
        question, timeout_s = json.loads(line)
        about, answer = pickle.loads(base64.b64decode(question))
        key = pickle.dumps(about)
        if key not in prepared:
            if len(prepared) == PREPARED:
                prepared.popitem(last=False)
            prepared[key] = prepare(*about)
        print(json.dumps(judge_in_fork(prepared[key], answer, timeout_s)), file=answers, flush=True)


def judge_in_fork(judge: PreparedJudge, answer: str, timeout_s: float) -> float | None:
    """The verdict, or None where there is none in time. Tried again if somebody else killed the fork, for want of memory."""
    until = time.monotonic() + timeout_s
    for _ in range(2):
        left_s = until - time.monotonic()
        verdict, killed = _try(judge, answer, left_s) if left_s > 0 else (None, False)
        if not killed:
            break
    return verdict


def _try(judge: PreparedJudge, answer: str, timeout_s: float) -> tuple[float | None, bool]:
    """A verdict, and whether the fork was killed by somebody else."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _be_confined(writer, timeout_s)
            if (verdict := judge(answer)) is not None:
                os.write(VERDICT, struct.pack("d", verdict))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        in_time, _, _ = select.select([reader], [], [], timeout_s)
        raw_verdict = os.read(reader, 16) if in_time else b""
    finally:
        os.close(reader)
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    killed = bool(in_time) and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return _verdict(raw_verdict), killed


def _be_confined(writer: int, timeout_s: float) -> None:
    """In the fork: keep nothing open but `VERDICT`, end with the parent, take no code for an answer, and compute only."""
    import confinement
    import vetted_eval

    os.dup2(writer, VERDICT)
    os.closerange(VERDICT + 1, 1 << 16)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    vetted_eval.install()
    confinement.confine(MEMORY_BYTES, math.ceil(timeout_s) + 1, [path for path in sys.path if path])


def _verdict(told: bytes) -> float | None:
    """What a fork said, if that is a verdict."""
    if len(told) != 8:
        return None
    (verdict,) = struct.unpack("d", told)
    return verdict if 0 <= verdict <= 1 else None


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -P leaves the program's own folder out
    main(sys.argv[1])
