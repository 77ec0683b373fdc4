"""The state of a group's ranks when a call to them failed: who is gone or silent, everybody's stacks and last lines."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from megarl.system.redaction import redacted

STACKS_DEADLINE_S = 10.0
LOG_LINES = 40
GONE, SHORT_OF_MEMORY = "is gone", "was ended by Ray, as its node was short of memory"


@dataclass(frozen=True)
class Examined:
    """One rank: `state` is empty for one that answers, else what is wrong with it, as in `rank 1 (process 77) is gone`."""

    rank: int
    state: str

    @property
    def is_gone(self) -> bool:
        """Return whether its process has ended."""
        return self.state in (GONE, SHORT_OF_MEMORY)


def examine(
    name: str, actors: Sequence[Any], host_and_pid: Sequence[tuple[str, int]], phase: str, log_folder: str
) -> list[Examined]:
    """Write `<log_folder>/stacks/<name>-<rank>.txt` for every rank and say which of them are gone or do not answer.

    A file has the phase, the rank's state, its Python stacks (its own, else py-spy's where that is installed and the rank is
    on this machine) and the last lines of its log. `host_and_pid`: (node IP, process id) by rank, empty if not known yet.
    """
    folder = Path(log_folder, "stacks")
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(len(actors)):
        (folder / f"{name}-{rank}.txt").unlink(missing_ok=True)
    references = [actor.dump_stacks.remote(str(folder)) for actor in actors]
    answered, _ = ray.wait(references, num_returns=len(references), timeout=STACKS_DEADLINE_S)
    here = ray.util.get_node_ip_address()
    examined = []
    for rank, reference in enumerate(references):
        at = host_and_pid[rank] if rank < len(host_and_pid) else None
        local_pid = at[1] if at is not None and at[0] == here else None
        state = _state(reference if reference in answered else None, local_pid)
        examined.append(Examined(rank, state))
        path = folder / f"{name}-{rank}.txt"
        stacks = path.read_text() if path.exists() else _stacks_from_outside(local_pid)
        where = f"process {at[1]} on {at[0]}" if at is not None else "not known where"
        log = Path(log_folder, f"{name}-{rank}.log")
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else ["(none)"]
        header = f"rank {rank} of {name} ({where}) in phase '{phase}': {state or 'answers'}"
        path.write_text(redacted("\n".join([header, "", stacks, f"Last lines of {log}:", *lines, ""])))
    return examined


def _state(answer: Any, local_pid: int | None) -> str:
    """Describe what is wrong with a rank that gave `answer` (None: none in time)."""
    if answer is not None:
        try:
            ray.get(answer, timeout=STACKS_DEADLINE_S)
            return ""
        except ray.exceptions.RayActorError:
            return GONE
        except ray.exceptions.OutOfMemoryError:
            return SHORT_OF_MEMORY
        except ray.exceptions.RayError:
            return "does not answer"
    if local_pid is not None:
        try:
            if psutil.Process(local_pid).status() == psutil.STATUS_STOPPED:
                return "is stopped (SIGSTOP)"
        except psutil.NoSuchProcess:
            return GONE
    return "does not answer"


def _stacks_from_outside(local_pid: int | None) -> str:
    program = shutil.which("py-spy")
    if program is None or local_pid is None or not psutil.pid_exists(local_pid):
        return "It gave no Python stacks."
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(local_pid)],
            capture_output=True,
            text=True,
            timeout=STACKS_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return "It gave no Python stacks, nor did py-spy get them."
    return done.stdout or f"It gave no Python stacks, nor did py-spy get them: {done.stderr.strip()}"
