"""A Ray over the nodes of a `Network`, each of which may be lost and started again."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.themes.multinode.namespaces import Network

ROOT = Path(__file__).parents[3]
PORT = 6390
TOKEN = secrets.token_hex(32)
"""What a Ray of this process wants to see, and what others on this machine do not have."""

OWN_SHARED_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
"""Machines share none: SGLang takes processes that do for processes of one machine."""


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of every process on the nodes."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    return own | {
        "GLOO_SOCKET_IFNAME": "eth0", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN,
    } | dict(more or {})  # fmt: skip


class RayNodes:
    """A Ray over all nodes of `network`, which says that each has `gpus` GPUs, as a context manager."""

    def __init__(
        self, network: Network, folder: Path, *, cpus: int, gpus: int, head_cpus: int | None = None,
        later: int = 0, more: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`folder` gets a log for each node; `more` environment variables go to all processes.

        Args:
            head_cpus: of the first node, where they are others.
            later: so many nodes, the last ones, are not started until `start` is called.
        """
        self.network, self._folder, self._environment = network, folder, environment(more)
        self._later, self._cpus, self._head_cpus = later, cpus, cpus if head_cpus is None else head_cpus
        self._options = ["--num-gpus", str(gpus), "--object-store-memory", str(10**8), "--block"]
        self._started: dict[int, subprocess.Popen[str]] = {}
        self.address = f"{network.nodes[0].address}:{PORT}"

    def __enter__(self) -> Self:
        try:
            for number in range(
                len(self.network.nodes) - self._later
            ):  # one after the other: two at once can miss the head's answer
                self.start(number)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in sorted(self._started, reverse=True):
            self._started[number].terminate()
        for process in self._started.values():
            process.wait(timeout=30)

    def start(self, number: int) -> None:
        """Start Ray on a node, for the first time or again, and wait until it is up."""
        node = self.network.nodes[number]
        cpus = self._cpus if number else self._head_cpus
        words = ["ray", "start", f"--node-ip-address={node.address}", "--num-cpus", str(cpus), *self._options]
        if number == 0:
            words += ["--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", f"/tmp/r{self.network.tag}"]
        else:
            words.append(f"--address={self.address}")
        log = self._folder / f"ray-{node.name}.txt"
        with log.open("w") as out:
            process = node.start(*OWN_SHARED_MEMORY, *words, env=self._environment, stdout=out, stderr=subprocess.STDOUT)
        self._started[number] = process
        ends_at = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends_at, log.read_text()
            time.sleep(0.2)

    def process(self, number: int) -> psutil.Process:
        """The process that holds a node's Ray: `ray start --block`."""
        return psutil.Process(self._started[number].pid)

    @property
    def started(self) -> list[int]:
        """Numbers of the nodes whose Ray is up."""
        return [number for number, process in self._started.items() if process.poll() is None]

    @property
    def gone(self) -> list[int]:
        """Numbers of the nodes whose Ray has ended."""
        return [number for number, process in self._started.items() if process.poll() is not None]

    def workers(self) -> Iterator[psutil.Process]:
        """The processes of runs: what Ray has started on the nodes for actors, now."""
        for process in self._started.values():
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if "ray::" in " ".join(child.cmdline()) and "Agent" not in child.cmdline()[0]:
                            yield child
