"""One process tree of SGLang's on this machine: started with its token, watched, and ended without remains.

Assumes Linux. Nothing of SGLang is imported here; the process runs `megarl.rollout.engines.sglang.launch`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from megarl.errors import EngineError
from megarl.system.atomic_files import for_owner
from megarl.system.process_tree import end_tree
from megarl.system.redaction import redacted

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOG_TAIL_LINES = 15
STOP_TIMEOUT_S = 10.0


def host() -> str:
    """The address at which servers listen: loopback, or the node's address in a run over several machines, whose ranks
    reach them there."""
    return os.environ.get("MEGARL_NODE_ADDRESS", "127.0.0.1")


class ServerProcess:
    """A process that runs SGLang with `arguments` and ends with this one.

    `log_file` has its command line, then what it says.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log_file: Path, token: str) -> None:
        """`token` is what every request to it must bring. A process that ends at once is seen by `code`."""
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "megarl.rollout.engines.sglang.launch", *arguments]
        with open(log_file, "w", opener=for_owner) as log:
            log.write(f"{redacted(shlex.join(command))}\n")
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closes when this process is gone, and the server ends with it
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it ended already, which is said where it is waited for
            self._process.stdin.write(f"{token}\n".encode())
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Process id; it leads its process group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the exit code, once it has ended (it ends itself when one of its children dies)."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill it and everything it started; returns when every process is gone. There is no state to save."""
        end_tree(self._process.pid)
        self._process.wait(timeout=STOP_TIMEOUT_S)
        if self._process.stdin is not None:
            self._process.stdin.close()


def log_tail(log_file: Path) -> str:
    """`<file> ends with:` and the last lines of a log, for error messages."""
    try:
        lines = log_file.read_text(errors="replace").splitlines()
    except OSError:
        return f"its log {log_file} cannot be read"
    return "\n".join([f"{log_file} ends with:", *lines[-LOG_TAIL_LINES:]])


def started_with(log_file: Path) -> dict[str, str]:
    """The options, by name, that the process which writes this log was started with; those without a value are left out."""
    with log_file.open(errors="replace") as log:
        words = shlex.split(log.readline())
    return {name[2:]: value for name, value in pairwise(words) if name.startswith("--") and not value.startswith("--")}


def claim_port(wanted: int | None = None, count: int = 1) -> int:
    """`wanted` if it is free, or the first of `count` free ports of the address that servers listen on.

    A port of our choice lies below those that the kernel hands out: the server binds it only after its long start.

    Raises:
        EngineError: `wanted` is in use.
    """
    if wanted is not None:
        if not _is_free(wanted):
            raise EngineError(
                f"rollout.servers.port is {wanted}, which is in use on {host()}; choose a free port or leave it out"
            )
        return wanted
    ceiling = int(EPHEMERAL_PORTS.read_text().split()[0]) if EPHEMERAL_PORTS.exists() else 32768
    tried = iter(lambda: secrets.choice(range(10_000, max(ceiling, 11_000) - count)), None)
    return next(port for port in tried if all(map(_is_free, range(port, port + count))))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host(), port))
        except OSError:
            return False
        return True
