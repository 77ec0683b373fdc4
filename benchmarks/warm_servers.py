"""Commands of megarl and SGLang's servers, forked from processes that have imported what they need: a start is mostly imports.

Nothing else of a start is changed. SGLang's servers are started as always, by an engine that calls a Python with its module;
`WarmSglang.python` is that Python: a program that has the server fork, and lives as long as what was forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

MODULE = "megarl.rollout.engines.sglang.launch"
OF_COMMANDS = (
    "ray", "uvicorn", "fastapi", "tinker", "transformers", "aiohttp",
    "megarl.cli.commands", "megarl.core.session", "megarl.supervise.restarts", "megarl.trainers.rl.train",
    "megarl.options.serve.app", "megarl.options.serve.command", "megarl.options.serve.http_server",
    "megarl.options.serve.after_restart", "megarl.options.serve.sampler", "megarl.options.serve.server_run",
    "megarl.options.serve.trainer",
)  # fmt: skip
OF_SERVERS = (
    "sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager", "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.model_executor.model_runner",
)  # fmt: skip
PYTHON = """#!{python} -SE
import json, os, select, socket, sys
if sys.argv[1:3] != ["-m", "{module}"]:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect("{address}")
    request = {{"arguments": sys.argv[3:], "environment": dict(os.environ), "folder": os.getcwd()}}
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    parent = os.getppid()
    while not select.select([server], [], [], 0.5)[0] and os.getppid() == parent:
        pass
"""


class Forked:
    """A process that is forked from this one and becomes what `become` does; the part of `subprocess.Popen` that is needed."""

    def __init__(self, become: Callable[[], None]) -> None:
        sys.stdout.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                become()
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Return when it has ended, or raise TimeoutExpired."""
        ends_at = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > ends_at:
                raise subprocess.TimeoutExpired("megarl", timeout)
            time.sleep(0.05)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def forked_command(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
    """`megarl ARGUMENTS`."""
    for name in OF_COMMANDS:
        importlib.import_module(name)
    return Forked(lambda: _become_command(arguments, environment, log))


def stand_alone(log: Path) -> None:
    """Give a forked process a session, outputs and signals of its own, as a program that was started has."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(out, number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _become_command(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    code = 1
    try:
        stand_alone(log)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        from megarl.cli.commands import main

        sys.argv = ["megarl", *arguments]  # read from here: a command that is called with arguments is not supervised
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


class WarmSglang:
    """SGLang's servers by fork, as a context manager. The first server brings the environment in which SGLang is imported."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-warm-sglang-")
        address, program = Path(self._folder.name) / "socket", Path(self._folder.name) / "python"
        program.write_text(PYTHON.format(python=sys.executable, module=MODULE, address=address))
        program.chmod(0o755)
        self.python = str(program)
        """What engines are to start their servers by."""
        self._server = subprocess.Popen([sys.executable, __file__, str(address)], stdin=subprocess.PIPE)
        while not address.exists():
            time.sleep(0.02)

    @property
    def forked(self) -> list[psutil.Process]:
        """The servers' processes, which are not below the runs that use them."""
        return psutil.Process(self._server.pid).children(recursive=True)

    def __enter__(self) -> WarmSglang:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.forked, psutil.Process(self._server.pid)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._server.wait()
        self._folder.cleanup()


def serve(address: str) -> None:
    """Fork a server of SGLang for every connection; a connection that closes ends its server, and the other way round."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    is_imported = False
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen(16)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not listener:
                    _end(key.data, selector)
                    continue
                connection = listener.accept()[0]
                message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                request: dict[str, Any] = json.loads(message)
                if not is_imported:
                    _import(request)
                    is_imported = True
                _fork(request, files, connection, selector)


def _import(request: dict[str, Any]) -> None:
    os.environ.update(request["environment"])
    launch = importlib.import_module(MODULE)
    launch._prepare_for_cpu(list(request["arguments"]))
    for name in OF_SERVERS:
        importlib.import_module(name)
    launch._install(list(request["arguments"]))
    gc.collect()
    gc.freeze()


def _fork(request: dict[str, Any], files: Sequence[int], connection: socket.socket, selector: selectors.BaseSelector) -> None:
    pid = os.fork()
    if pid == 0:
        for inherited in (connection.fileno(), *selector.get_map()):
            os.close(inherited)
        _become_server(request, files)
    for file in files:
        os.close(file)
    pair = (connection, os.pidfd_open(pid))
    for part in pair:
        selector.register(part, selectors.EVENT_READ, pair)


def _end(pair: tuple[socket.socket, int], selector: selectors.BaseSelector) -> None:
    connection, handle = pair
    if handle not in selector.get_map():
        return
    for part in pair:
        selector.unregister(part)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    connection.close()


def _become_server(request: dict[str, Any], files: Sequence[int]) -> None:
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        imported = os.environ["SGLANG_DISABLED_MODEL_ARCHS"]
        os.environ.clear()
        os.environ.update(request["environment"] | {"SGLANG_DISABLED_MODEL_ARCHS": imported})
        tempfile.tempdir = None  # the imports have found the folder of an attempt that may have ended
        os.chdir(request["folder"])
        launch = importlib.import_module(MODULE)
        launch._prepare_for_cpu = launch._install = lambda arguments: None  # it was done before the fork
        arguments = list(request["arguments"])
        if launch._ADAPTERS in arguments and launch._CPU_BACKEND[0] not in arguments:
            arguments += launch._CPU_BACKEND
        sys.argv = [launch.__file__, *arguments]
        launch.main(arguments)
    except BaseException:  # noqa: BLE001 - as at a program's end
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
