"""Ray's workers, forked from a server that has imported torch, megatron-core, transformers and Ray once.

Those imports are ten seconds of every actor, of which a whole run has two or more; nothing else of Ray is changed. Ray starts
its workers by the command `WarmWorkers.python` (`runtime_env={"py_executable": ...}`): `tests/warm_worker.py`, which
has the server fork and lives as long as what was forked. That serves every local Ray: one that a test starts, and those of the
runs that it starts as processes with `WarmWorkers.environment`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megarl.system.process_exit import end_with_parent

PYTHON_OF_WORKERS = "MEGARL_TESTS_PYTHON"
"""Variable of a worker's environment: by what it starts Python programs itself, where that is not this Python."""
REPOSITORY = Path(__file__).resolve().parents[1]


class WarmWorkers:
    """The server as a context manager. Workers that are asked for before it is ready wait for it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-warm-")
        self._address = address = str(Path(self._folder.name) / "socket")
        self.python = f"{sys.executable} -S -E {REPOSITORY / 'tests' / 'warm_worker.py'} {address}"
        """The command by which Ray starts a worker."""
        command = [sys.executable, "-m", "tests.warm_workers", address]
        self._server = subprocess.Popen(command, env=_server_environment(), stdin=subprocess.PIPE)

    @property
    def environment(self) -> dict[str, str]:
        """What makes the local Ray of a process that has it start its workers so."""
        # the server has imported Ray, without a token
        python = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": self.python}})}
        return {**python, "RAY_AUTH_MODE": "disabled"}

    def wait(self) -> None:
        """Return when the server is ready."""
        while not os.path.exists(self._address):
            assert self._server.poll() is None, "the server of warm workers ended"
            time.sleep(0.05)

    @property
    def forked(self) -> list[psutil.Process]:
        """The workers of all local Rays, which are not below the runs that use them."""
        return psutil.Process(self._server.pid).children(recursive=True)

    def __enter__(self) -> WarmWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()


def _server_environment() -> dict[str, str]:
    """That of a worker, as far as it is read once: the allocator's settings, and two constants of Ray's library.

    The only job of a local Ray is its first. Whether the raylet is alive is what tests/warm_worker.py asks, so for the library
    a process stands in that lives as long as the tests do.
    """
    from megarl.platform.cpu import CpuPlatform

    of_ray = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(os.getpid())}
    return os.environ | CpuPlatform().worker_env(1) | of_ray | {"PYTHONPATH": str(REPOSITORY)}


def serve(address: str) -> None:
    """Fork a worker for every connection, until standard input closes. Either of the two ends the other."""
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        _import()
        listener.bind(address)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that ended
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    _add_worker(listener.accept()[0], selector)
                else:  # its worker has ended, or who asked for it: that one may be stopped, and is ended all the same
                    _end_worker(key.data, selector)


@dataclass(frozen=True)
class _Forked:
    connection: socket.socket
    handle: int


def _add_worker(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        for inherited in (connection.fileno(), *selector.get_map()):
            os.close(inherited)
        _become_worker(json.loads(message), files)
    for file in files:
        os.close(file)
    try:
        worker = _Forked(connection, os.pidfd_open(pid))
    except ProcessLookupError:
        connection.close()
        return
    for part in (worker.connection, worker.handle):
        selector.register(part, selectors.EVENT_READ, worker)


def _end_worker(worker: _Forked, selector: selectors.BaseSelector) -> None:
    if worker.handle not in selector.get_map():  # both ended at once
        return
    for part in (worker.connection, worker.handle):
        selector.unregister(part)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(worker.handle, signal.SIGKILL)
    os.close(worker.handle)
    worker.connection.close()


def _import() -> None:
    """Import what workers do, but no file that makes a Ray actor of a class.

    That draws from the library's random numbers: all workers would go on with the same ones, and those that start at the same
    moment name their first objects alike, of which one then dies and is waited for, for a minute.
    """
    for name in (
        "tests.world_imports",  # installs the platform, and so comes first
        "ray._private.workers.default_worker",
        "megarl.rollout.engines.embedded",
        "megarl.workers.rank",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _become_worker(request: dict[str, Any], files: Sequence[int]) -> None:
    """Run the worker's script with the arguments, environment, folder and output of the process that asked for it."""
    import torch
    from ray._raylet import Config

    os.setsid()  # Ray ends a worker with its process group
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    Config.initialize("")  # Ray's library reads its settings from the environment again
    tempfile.tempdir = None  # that of the environment
    sys.executable = os.environ.get(PYTHON_OF_WORKERS, sys.executable)
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


def _end_with_client(address: str) -> None:
    """When who started the server is gone, however it ended, remove the folder of the socket and end."""
    sys.stdin.read()
    shutil.rmtree(Path(address).parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_client, args=(sys.argv[1],), daemon=True).start()
    serve(sys.argv[1])
