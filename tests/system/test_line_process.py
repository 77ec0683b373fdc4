"""A process that answers lines ends with whoever holds it."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import psutil
import pytest

from megarl.system.line_process import EndedError, LineProcess

ECHO = [sys.executable, "-c", "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"]
WAIT_S = 30.0


def test_it_answers_and_ends_when_its_input_closes() -> None:
    process = LineProcess(ECHO)
    assert process.start("[1]", WAIT_S) == [1]
    assert process.start("[2]", WAIT_S) is None, "it runs"
    assert process.ask("[3]", WAIT_S) == [3]
    assert process.end(WAIT_S)
    assert process.pid is None
    with pytest.raises(EndedError):
        LineProcess([sys.executable, "-c", ""]).start("[1]", WAIT_S)


def test_it_ends_with_the_last_holder() -> None:
    process = LineProcess(ECHO)
    process.start("[1]", WAIT_S)
    assert process.pid is not None
    child = psutil.Process(process.pid)
    del process
    gc.collect()
    psutil.wait_procs([child], timeout=WAIT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_ending_it_while_another_thread_asks() -> None:
    """Its end is heard first by the one, then by the other."""
    process = LineProcess([sys.executable, "-c", "import sys\nprint(input(), flush=True)\nsys.stdin.read()"])
    process.start("[1]", WAIT_S)
    popen, heard = process._process, []
    assert popen is not None
    wait = popen.wait

    def ask() -> None:
        with pytest.raises(EndedError) as raised:
            process.ask("[2]", WAIT_S)
        heard.append(raised)

    asking = threading.Thread(target=ask)

    def wait_for_the_other(timeout: float | None = None) -> Any:
        if threading.current_thread() is not asking:
            asking.join(WAIT_S)
        return wait(timeout)

    popen.wait = wait_for_the_other  # type: ignore[method-assign]
    asking.start()
    assert process.end(WAIT_S)
    assert len(heard) == 1
    assert process.pid is None
