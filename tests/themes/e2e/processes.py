"""Runs as processes of their own, and processes that end-to-end runs must not leave behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from megarl.observe import read_metrics


def outside_ray() -> dict[str, str]:
    """This process's environment without what joins its Ray; a token that a cluster of this test asks for stays."""
    joins = [name for name in os.environ if name.startswith("RAY_") and not name.startswith("RAY_AUTH_")]
    return {name: value for name, value in os.environ.items() if name not in joins}


def start_megarl(
    *arguments: str, environment: Mapping[str, str] | None = None, terminal: int | None = None
) -> subprocess.Popen[str]:
    """`megarl` with these arguments and more environment; what it says on stderr is kept, or all goes to its own `terminal`."""
    command, env = [sys.executable, "-m", "megarl", *arguments], outside_ray() | dict(environment or {})
    if terminal is not None:
        ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
        command = ["env", "--default-signal=HUP", "setsid", "--ctty", *command]  # also where the tests run under nohup
        return subprocess.Popen(command, env=env, text=True, **ends)
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for_step(run: subprocess.Popen[str], folder: Path, step: int, deadline_s: float = 240) -> None:
    """Return when metrics.jsonl has `step`; the run must be alive until then."""
    ends_at, metrics = time.monotonic() + deadline_s, folder / "metrics.jsonl"
    while not (metrics.exists() and any(row["step"] >= step for row in read_metrics(metrics))):
        assert run.poll() is None, run.stderr.read() if run.stderr else ""
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def servers() -> set[int]:
    """Processes below this one that are SGLang's (Ray's own workers come and go)."""
    found = set()
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "sglang" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found
