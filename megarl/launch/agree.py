"""Whether the nodes of a job can work together, and on which interface and ports: verdicts over their facts, as data."""

from __future__ import annotations

import ipaddress
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import ConfigError
from megarl.launch.node_facts import PORTS_PER_JOB, NodeFacts

GIB = 1024**3
CLOCK_S = 5.0
FREE_DISK_BYTES = 5 * GIB
FREE_SHM_BYTES = 1 * GIB
HOT_C = 88
USED_MIB = 1024
_VIRTUAL = ("docker", "virbr", "br-", "cni", "flannel", "podman")


@dataclass(frozen=True)
class Agreement:
    """The agreement of all nodes: the interface, everyone's address on it (by node name), and the first port of a free
    block."""

    head: str
    interface: str
    addresses: dict[str, str]
    first_port: int

    def shell(self, token: Path) -> str:
        """Write the agreement as assignments for the job's scripts. `token` is the file that lets a process join the
        job's Ray."""
        addresses = " ".join(f"[{name}]={address}" for name, address in self.addresses.items())
        return (
            f"head_name={self.head}\nhead_address={self.addresses[self.head]}\ninterface={self.interface}\n"
            f"first_port={self.first_port}\ndeclare -A addresses=({addresses})\n"
            "export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface\n"
            f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={shlex.quote(str(token))}\n"
        )


def agree(nodes: Sequence[NodeFacts], head: str, *, interface: str | None, ports_from: int, gpus: int) -> Agreement:
    """Refuse nodes that cannot work together, else say what they use. `ports_from`: a number of the job, spreads the ports.

    Raises:
        ConfigError: names the nodes and what to do.
    """
    for problem in (*differing_versions(nodes), *missing_gpus(nodes, gpus)):
        raise ConfigError(problem)
    if head not in {node.name for node in nodes}:
        raise ConfigError(f"the first node is {head}, but only {', '.join(n.name for n in nodes)} said what they are")
    chosen = choose_interface(nodes, interface)
    addresses = {node.name: node.interfaces[chosen][0] for node in nodes}
    return Agreement(head, chosen, addresses, choose_ports(nodes, ports_from))


def choose_interface(nodes: Sequence[NodeFacts], wanted: str | None) -> str:
    """The interface that every node has, each with an address of its own: `wanted`, else the fastest, one network first.

    Raises:
        ConfigError: there is none, or `wanted` is not one of them.
    """
    common = set.intersection(*(set(node.interfaces) for node in nodes))
    usable = {name for name in common if len({node.interfaces[name][0] for node in nodes}) == len(nodes)}
    have = "; ".join(f"{node.name} has {', '.join(sorted(node.interfaces)) or 'none'}" for node in nodes[:4])
    if wanted is not None:
        if wanted not in usable:
            why = "has no address of its own on every node" if wanted in common else "is not up on every node"
            allowed = f"it must be {', '.join(sorted(usable))}" if usable else have
            raise ConfigError(f"interface is '{wanted}', but it {why}; {allowed}")
        return wanted
    real = {name for name in usable if not name.startswith(_VIRTUAL)} or usable
    if not real:
        raise ConfigError(
            f"no network interface of one name connects the {len(nodes)} nodes ({have}); "
            "name one with --interface, after making its name the same on all nodes"
        )

    def rank(name: str) -> tuple[bool, int, str]:
        addresses = [node.interfaces[name] for node in nodes]
        networks = {ipaddress.ip_network(f"{address}/{bits}", strict=False) for address, bits, _ in addresses}
        return len(networks) > 1, -min(speed for _, _, speed in addresses), name

    return min(real, key=rank)


def choose_ports(nodes: Sequence[NodeFacts], ports_from: int) -> int:
    """First port of a block of 1,000 that is free on every node; jobs of different numbers start looking at different ones.

    Raises:
        ConfigError: there is no such block.
    """
    free = sorted(set.intersection(*(set(node.free_ports) for node in nodes)))
    if not free:
        raise ConfigError(
            f"no {PORTS_PER_JOB} ports in a row below the ephemeral range are free on all {len(nodes)} nodes; end other "
            "jobs on them, or raise net.ipv4.ip_local_port_range's start"
        )
    return free[ports_from % len(free)]


def differing_versions(nodes: Sequence[NodeFacts]) -> list[str]:
    """A sentence for every package of which the nodes have different versions."""
    sentences = []
    for package in nodes[0].versions:
        by_node = {node.name: node.versions.get(package) for node in nodes}
        if len(set(by_node.values())) > 1:
            usual = Counter(by_node.values()).most_common(1)[0][0]
            odd = ", ".join(f"{name} has {version or 'none'}" for name, version in by_node.items() if version != usual)
            sentences.append(f"{package} is {usual or 'missing'} on most nodes, but {odd}; use one environment or image")
    return sentences


def missing_gpus(nodes: Sequence[NodeFacts], wanted: int) -> list[str]:
    """A sentence for every node with fewer GPUs than `wanted`."""
    return [
        f"{node.name} shows {len(node.gpus)} GPUs, but the job has {wanted} on each node"
        f"{f' ({node.gpu_problem})' if node.gpu_problem else ''}; leave the node out, or repair it"
        for node in nodes
        if len(node.gpus) < wanted
    ]


def verdicts(node: NodeFacts, others: Sequence[NodeFacts]) -> list[str]:
    """Problems and doubts about one node, as short remarks; `others` are all nodes."""
    checks = [
        (node.free_disk_bytes < FREE_DISK_BYTES, f"{node.free_disk_bytes / GIB:.1f} GiB free on the local disk"),
        (node.free_shared_bytes < FREE_DISK_BYTES, f"{node.free_shared_bytes / GIB:.1f} GiB free on the shared disk"),
        (node.shm_bytes < FREE_SHM_BYTES, f"/dev/shm has {node.shm_bytes / GIB:.1f} GiB, Ray's objects want more"),
        (node.gpu_problem is not None, f"GPUs cannot be asked: {node.gpu_problem}"),
        (len(node.gpus) < max(len(o.gpus) for o in others), f"{len(node.gpus)} GPUs, fewer than others"),
        (node.memory_bytes < 0.9 * max(o.memory_bytes for o in others), "less memory than others"),
        (len({gpu.driver for o in others for gpu in o.gpus}) > 1, "GPU drivers differ between nodes"),
    ]
    remarks = [text for is_so, text in checks if is_so]
    for number, gpu in enumerate(node.gpus):
        if gpu.uncorrected_errors:
            remarks.append(f"GPU {number}: {gpu.uncorrected_errors} uncorrected memory errors")
        if gpu.is_slowed or gpu.temperature_c >= HOT_C:
            remarks.append(f"GPU {number}: slowed by its hardware, {gpu.temperature_c} °C")
        if gpu.used_mib > USED_MIB:
            remarks.append(f"GPU {number}: {gpu.used_mib} MiB are in use")
    return remarks
