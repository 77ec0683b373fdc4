"""`megarl doctor --ports`: what the runs and servers of this user listen on, on this machine, and who may connect by what.

Read from the system's tables, from command lines, from Ray's logs and from the names that megarl's own servers give their
sockets; no port is asked anything: some would take that for a peer's beginning.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from rich.markup import escape
from rich.table import Table

from megarl.errors import ConfigError
from megarl.system.ray_token import MODE
from megarl.system.socket_names import NOTHING, socket_names

_COMMANDS = ("train", "sft", "reward-model", "preference", "eval", "generate", "serve-reward", "report", "rehearse", "submit")
"""Commands of megarl that may listen, or start something that does."""
_RAY_PARTS = (
    ("core/src/ray/gcs/gcs_server", "Ray: GCS"),
    ("core/src/ray/raylet/raylet", "Ray: raylet"),
    ("runtime_env/agent", "Ray: runtime environments"),
    ("ray::RuntimeEnvAgent", "Ray: runtime environments"),
    ("dashboard/agent", "Ray: dashboard agent"),
    ("ray::DashboardAgent", "Ray: dashboard agent"),
    ("ray/dashboard/dashboard", "Ray: dashboard"),
    ("ray.util.client.server", "Ray: client server"),
)
_FIGURES = ("autoscaler/_private/monitor", "Ray: monitor")
_COLLECTIVES = "torch.distributed (TCPStore, Gloo, NCCL)"


@dataclass(frozen=True)
class SeenProcess:
    """Facts known of a process. `sockets` are (protocol, address, port) that it listens on."""

    pid: int
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    sockets: tuple[tuple[str, str, int], ...] = ()
    ray_port: int | None = None
    """The one on which Ray's part of the process listens, by its log."""
    named: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """By port the role of a server of megarl, and what it asks for, as the process says."""

    @property
    def line(self) -> str:
        """Command line of the process."""
        return " ".join(self.command).strip()


@dataclass(frozen=True)
class Listener:
    """One socket. `by` is what whoever connects must bring; `is_open`: other machines reach it, and must bring nothing."""

    process: int
    role: str
    protocol: str
    address: str
    port: int
    by: str

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches it."""
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback

    @property
    def is_open(self) -> bool:
        return not self.is_loopback and self.by.startswith(NOTHING)

    @property
    def who(self) -> str:
        """Name those who may connect, as a sentence's subject."""
        reach = "any user of this machine" if self.is_loopback else "whoever reaches this machine"
        return reach if self.by.startswith(NOTHING) else f"{reach} and has {self.by}"


def listening(run: str | Path | None = None) -> list[Listener]:
    """Sockets that are listened on, by the runs and servers of this user or by the run in the folder `run` alone.

    Raises:
        ConfigError: there is no such folder.
    """
    if run is not None and not Path(run).is_dir():
        raise ConfigError(f"there is no folder '{run}'; --ports takes the folder of a run, such as runs/my-run")
    chosen = _trees()
    if run is not None:
        folder = Path(run).resolve()
        chosen = [tree for tree in chosen if any(_has_open(process, folder) for process in tree)]
    return listeners([seen for tree in chosen for seen in _with_rays_mode(list(filter(None, map(_seen, tree))))])


def listeners(processes: Sequence[SeenProcess]) -> list[Listener]:
    """The sockets of `processes`, each once: one that a process inherited is its parent's."""
    by_socket: dict[tuple[str, str, int], Listener] = {}
    for process in processes:
        for protocol, address, port in process.sockets:
            role, by = _role(process, port)
            by_socket.setdefault((protocol, address, port), Listener(process.pid, role, protocol, address, port, by))
    return sorted(by_socket.values(), key=lambda one: (not one.is_open, one.process, one.port))


def render(found: Sequence[Listener]) -> Table:
    """The report as a table, what is open first."""
    table = Table("", "process", "what", "listens on", "who may connect", box=None, pad_edge=False)
    for listener in found:
        mark = "[red]open[/]" if listener.is_open else "[green]ok[/]"
        address = f"[{listener.address}]" if ":" in listener.address else listener.address
        endpoint = f"{address}:{listener.port}{'/udp' * (listener.protocol == 'udp')}"
        table.add_row(mark, str(listener.process), escape(listener.role), escape(endpoint), escape(listener.who))
    return table


def as_json(found: Sequence[Listener]) -> list[dict[str, Any]]:
    """The same as plain values."""
    return [asdict(listener) | {"open": listener.is_open, "who": listener.who} for listener in found]


# roles -----------------------------------------------------------------------------------------------------------------


def _role(process: SeenProcess, port: int) -> tuple[str, str]:
    """The role of a process that listens on `port`, and what must be brought there: nothing, where that is not known."""
    if port in process.named:
        return process.named[port]
    line = process.line
    ray = "Ray's token" if process.environment.get(MODE) == "token" else NOTHING
    for mark, role in _RAY_PARTS:
        if mark in line or mark in process.name:
            return role, ray
    if _FIGURES[0] in line:
        return f"{_FIGURES[1]}, figures for Prometheus", f"{NOTHING}; it tells figures and takes no orders"
    who = _worker(process)
    if port == process.ray_port:
        return f"{who}: Ray", ray
    if who in ("rank", "engine's actor"):
        return f"{who}: {_COLLECTIVES}", NOTHING
    if "megarl.rollout.engines.sglang.launch" in line or process.name.startswith("sglang::"):
        if _option(process.command, "--port") == str(port):
            return "SGLang server", "the server's token"
        return f"SGLang: {_COLLECTIVES}, ZeroMQ", NOTHING
    if who == "driver":
        return (f"rank under torchrun: {_COLLECTIVES}" if "RANK" in process.environment else "driver: not known"), NOTHING
    return f"{who}: rendezvous (TCPStore)" if who == "torchrun" else f"{who}: {process.name}", NOTHING


def _worker(process: SeenProcess) -> str:
    for mark, role in (("ray::RankProcess", "rank"), ("ray::Engine", "engine's actor"), ("ray::", "Ray's worker")):
        if process.name.startswith(mark) or process.line.startswith(mark):
            return role
    if _is_torchrun(process.command):
        return "torchrun"
    return "driver" if _megarl_command(process.command) else "a program of the run"


def _is_torchrun(command: Sequence[str]) -> bool:
    """`torchrun …`, which may name `-m megarl` as what it starts, or `python -m torch.distributed.run …`."""
    return any(Path(word).name == "torchrun" or word == "torch.distributed.run" for word in command[:4])


def _megarl_command(command: Sequence[str]) -> str:
    """`train` of `python -m megarl train …` or `…/bin/megarl train …`; empty for other programs."""
    for index, word in enumerate(command[:-1]):
        if (word == "megarl" and command[index - 1] == "-m") or (Path(word).name == "megarl" and index <= 1):
            return command[index + 1] if command[index + 1] in _COMMANDS else ""
    return ""


def _option(command: Sequence[str], name: str) -> str | None:
    for index, word in enumerate(command):
        if word == name and index + 1 < len(command):
            return command[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


# processes -------------------------------------------------------------------------------------------------------------


def _trees() -> list[list[psutil.Process]]:
    """The topmost processes of megarl's commands, of torchruns with one below them, and of Ray, each with all it started."""
    ours: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real != os.getuid():
                continue
            if _megarl_command(process.cmdline()):
                ours.add(process)
                ours |= {up for up in process.parents() if _is_torchrun(up.cmdline())}
            elif _is_of_ray(" ".join(process.cmdline())):
                ours.add(process)
    trees = []
    for process in ours:
        with contextlib.suppress(psutil.Error, OSError):
            if not ours.intersection(process.parents()):
                trees.append([process, *process.children(recursive=True)])
    return trees


def _seen(process: psutil.Process) -> SeenProcess | None:
    """Facts of a process, those that can be read; None if it is gone, or another user's."""
    with contextlib.suppress(psutil.Error, OSError):
        words, sockets = (process.name(), tuple(process.cmdline())), list[tuple[str, str, int]]()
        environment: dict[str, str] = {}
        ray_port, named = None, {}
        with contextlib.suppress(psutil.Error, OSError):
            for connection in process.net_connections("inet"):
                is_tcp = connection.type == socket.SOCK_STREAM
                if connection.status == psutil.CONN_LISTEN if is_tcp else bool(connection.laddr and not connection.raddr):
                    sockets.append(("tcp" if is_tcp else "udp", connection.laddr.ip, connection.laddr.port))
            environment = process.environ()
            ray_port = _ray_port(process) if sockets else None
        if sockets:
            named = socket_names(process.pid)
        return SeenProcess(process.pid, *words, environment, tuple(sockets), ray_port, named)
    return None


def _is_of_ray(line: str) -> bool:
    return any(mark in line for mark, _ in _RAY_PARTS)


def _with_rays_mode(tree: Sequence[SeenProcess]) -> list[SeenProcess]:
    """The token mode that Ray asks for, as its own parts were started: the system shows of others the environment before
    they chose it."""
    modes = [process.environment[MODE] for process in tree if MODE in process.environment and _is_of_ray(process.line)]
    return [replace(process, environment={**process.environment, MODE: modes[0]}) for process in tree] if modes else list(tree)


def _ray_port(process: psutil.Process) -> int | None:
    """The port of Ray's part of a process, from the log that this has open."""
    for file in process.open_files():
        if re.search(rf"/python-core-(worker|driver)-\w+_{process.pid}\.log$", file.path):
            with contextlib.suppress(OSError), Path(file.path).open(errors="replace") as log:
                match = re.search(r"server started, listening on port (\d+)", log.read(1 << 16))
                return int(match[1]) if match else None
    return None


def _has_open(process: psutil.Process, folder: Path) -> bool:
    """Return whether the process has a file open in `folder`, works there, or was given it as an argument."""
    with contextlib.suppress(psutil.Error, OSError):
        paths = [file.path for file in process.open_files()]
        paths += [str(Path(process.cwd(), word).resolve()) for word in process.cmdline()[1:] if not word.startswith("-")]
        return any(Path(path).is_relative_to(folder) for path in paths)
    return False
