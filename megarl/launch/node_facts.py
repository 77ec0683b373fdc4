"""Facts of one node: asked on every node of a job, written into a folder that all of them share, and compared there.

Runs before anything of the run, so it imports neither torch nor ray; what may hang or crash is asked in a child process.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from megarl.errors import ConfigError
from megarl.observe.record_lines import object_line
from megarl.observe.summary import versions
from megarl.system.atomic_files import write_text_atomically

PORTS_PER_JOB = 1000
LOWEST_PORT = 10_000
SERVICE_PORTS = 10
"""Number of a job's first ports that are for Ray's services and torchrun; the others are for Ray's workers."""
_GPU_FIELDS = ("name", "uuid", "driver_version", "memory.used", "memory.total", "temperature.gpu",
               "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.hw_slowdown")  # fmt: skip
_GPU_DEADLINE_S = 60


@dataclass(frozen=True)
class GpuStatus:
    """One GPU as nvidia-smi shows it. `uncorrected_errors` is None where the GPU does not count them."""

    name: str
    driver: str
    used_mib: int
    total_mib: int
    temperature_c: int
    uncorrected_errors: int | None
    is_slowed: bool


@dataclass(frozen=True)
class NodeFacts:
    """One node. `interfaces`: IPv4 address, prefix length and Mbit/s by name; `free_ports`: first port of each free block."""

    name: str
    hostname: str
    versions: dict[str, str | None]
    cores: int
    memory_bytes: int
    free_disk_bytes: int
    free_shared_bytes: int
    interfaces: dict[str, tuple[str, int, int]]
    free_ports: tuple[int, ...]
    gpus: tuple[GpuStatus, ...] = ()
    gpu_problem: str | None = None
    shm_bytes: int = 0


def describe_node(shared_folder: str | Path, local_folder: str | Path = "/tmp") -> NodeFacts:
    """Facts of this node; `shared_folder` is where the run writes, `local_folder` is on the node's own disk."""
    gpus, gpu_problem = _gpus()
    shm = Path("/dev/shm")
    return NodeFacts(
        name=node_name(),
        hostname=socket.gethostname(),
        versions=versions(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        free_disk_bytes=shutil.disk_usage(local_folder).free,
        free_shared_bytes=shutil.disk_usage(shared_folder).free,
        interfaces=interfaces(),
        free_ports=tuple(free_port_blocks()),
        gpus=tuple(gpus),
        gpu_problem=gpu_problem,
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else 0,
    )


def node_name() -> str:
    """The batch system's name of this node, else its host name."""
    return os.environ.get("NODE_NAME") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def write_facts(folder: str | Path, facts: NodeFacts) -> Path:
    """Write the facts as `<folder>/<name>.json`; returns the file."""
    path = Path(folder) / f"{facts.name}.json"
    write_text_atomically(path, json.dumps(asdict(facts)))
    return path


def read_facts(folder: str | Path, *, count: int, deadline_s: float = 30.0, names: tuple[str, ...] = ()) -> list[NodeFacts]:
    """The facts of `count` nodes; waits `deadline_s` for a network file system to show them. `names`: who is expected.

    Raises:
        ConfigError: some node's file is not seen here: the folder is not shared.
    """
    ends_at = time.monotonic() + deadline_s
    while True:
        found: dict[str, NodeFacts] = {}
        for file in sorted(Path(folder).glob("*.json")):
            with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):  # its content may be seen later
                found[file.stem] = facts_from(object_line(file.read_bytes()))
        if len(found) >= count:
            return [*found.values()]
        if time.monotonic() > ends_at:
            seen = [*found]
            missing = [name for name in names if name not in seen]
            who = f"what {', '.join(missing)} wrote" if missing else f"what {count - len(seen)} of {count} nodes wrote"
            raise ConfigError(
                f"{who} to {folder} is not seen on {node_name()}; run.folder must be on a file system that all nodes share"
            )
        time.sleep(0.2)


def facts_from(tree: dict[str, Any]) -> NodeFacts:
    """The facts that `asdict` made a tree of."""
    tree = dict(tree)
    tree["gpus"] = tuple(GpuStatus(**gpu) for gpu in tree["gpus"])
    tree["interfaces"] = {name: tuple(value) for name, value in tree["interfaces"].items()}
    tree["free_ports"] = tuple(tree["free_ports"])
    return NodeFacts(**tree)


def interfaces() -> dict[str, tuple[str, int, int]]:
    """Name to (IPv4 address, prefix length, Mbit/s) of every interface that is up, without loopback."""
    speeds = psutil.net_if_stats()
    by_name = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            is_usable = address.family == socket.AF_INET and not address.address.startswith(("127.", "169.254."))
            if is_usable and name in speeds and speeds[name].isup:
                bits = sum(bin(int(byte)).count("1") for byte in (address.netmask or "255.255.255.255").split("."))
                by_name[name] = (address.address, bits, speeds[name].speed)
                break
    return by_name


def free_port_blocks(lowest_ephemeral: int | None = None) -> list[int]:
    """First ports of the blocks of 1,000 below the ephemeral range in which this node's service ports are free."""
    end = min(lowest_ephemeral or _lowest_ephemeral_port(), 65_536)
    return [
        first
        for first in range(LOWEST_PORT, end - PORTS_PER_JOB + 1, PORTS_PER_JOB)
        if all(_is_free(first + offset) for offset in range(SERVICE_PORTS))
    ]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _lowest_ephemeral_port() -> int:
    """The port from which the kernel gives out ports by itself; a fixed port above could be taken by anyone at any time."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768


def _gpus() -> tuple[list[GpuStatus], str | None]:
    """This node's GPUs, or why nvidia-smi does not show them (None where the node has no NVIDIA driver)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi is not on the PATH" if Path("/dev/nvidiactl").exists() else None
    command = [program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {_GPU_DEADLINE_S} s"
    if answer.returncode:
        text = (answer.stderr or answer.stdout).strip().splitlines()
        return [], text[-1] if text else f"nvidia-smi left with exit code {answer.returncode}"
    return parse_gpus(answer.stdout), None


def parse_gpus(text: str) -> list[GpuStatus]:
    """GPUs from nvidia-smi's lines of comma-separated values."""
    gpus = []
    for line in text.strip().splitlines():
        name, _, driver, used, total, temperature, errors, slowed = (part.strip() for part in line.split(","))
        gpus.append(
            GpuStatus(
                name, driver, int(used), int(total), int(temperature) if temperature.isdigit() else 0,
                int(errors) if errors.isdigit() else None, slowed == "Active",
            )
        )  # fmt: skip
    return gpus
