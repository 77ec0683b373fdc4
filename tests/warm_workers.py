"""Ray's workers, forked from a server that has imported torch, megatron-core, transformers and Ray once.

Those imports are ten seconds of every actor, of which a whole run has two or more; nothing else of Ray is changed. Ray starts
its workers by the command `WarmWorkers.python` (`runtime_env={"py_executable": ...}`): `tests/warm_worker.py`, which
has the server fork and lives as long as what was forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


class WarmWorkers:
    """The server as a context manager: `python` is the command by which Ray starts a worker; `start` it when Ray runs.

    Ray's library reads its settings when it is imported, and `ray.init` makes some of them.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-warm-")
        self._address = str(Path(self._folder.name) / "socket")
        self._server: subprocess.Popen[bytes] | None = None
        self.python = f"{sys.executable} -S -E {REPOSITORY / 'tests' / 'warm_worker.py'} {self._address}"

    def start(self) -> None:
        """Start the server; workers that are asked for before it is ready wait for it."""
        import ray

        from megarl.platform.cpu import CpuPlatform

        raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
        of_ray = {"RAY_JOB_ID": ray.get_runtime_context().get_job_id(), "RAY_RAYLET_PID": str(raylet)}
        # the allocator's settings, too, are read when a process starts
        environment = os.environ | CpuPlatform().worker_env(1) | of_ray | {"PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "tests.warm_workers", self._address]
        self._server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)

    def __enter__(self) -> WarmWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._folder.cleanup()


def serve(address: str) -> None:
    """Fork a worker for every connection, until standard input closes."""
    with socket.socket(socket.AF_UNIX) as listener:
        _import()
        listener.bind(address)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that ended
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _become_worker(connection)
            connection.close()


def _import() -> None:
    for name in (
        "tests.world_imports",  # installs the platform, and so comes first
        "ray._private.workers.default_worker",
        "megarl.rollout.engines.embedded",
        "megarl.workers.engine_actor",
        "megarl.workers.rank",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _become_worker(connection: socket.socket) -> None:
    """Run the worker's script with the arguments, environment, folder and output of the process that asked for it."""
    import torch

    message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    request: dict[str, Any] = json.loads(message)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


def _end_with(connection: socket.socket) -> None:
    """End this process with the one that asked for it."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    serve(sys.argv[1])
