"""Nodes on one machine: network namespaces with an address each, on a bridge; their processes see each other by TCP alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    probe = f"mrlprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"this kernel makes no network namespaces: {made.stderr.strip()}"
    ip("netns", "del", probe)
    return None


def ip(*words: str) -> None:
    """Run `ip`; raises with what it said."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Node:
    """One namespace."""

    name: str
    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """`words` as a command inside; `ip netns exec` would hide /sys/fs/cgroup."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *words]

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a process inside, in a process group of its own."""
        return subprocess.Popen(self.command(*words), text=True, start_new_session=True, **options)


class Network:
    """`count` nodes n1, n2, … with the addresses SUBNET.11, .12, …; this machine is SUBNET.1 on their bridge."""

    made = 0
    """Networks of this process so far, which may exist at the same time."""

    def __init__(self, count: int) -> None:
        Network.made += 1
        self.tag = f"{os.getpid() % 100_000:05d}{'abcdefgh'[Network.made % 8]}"
        self.subnet = f"10.{100 + os.getpid() % 100}.{Network.made % 8}"
        self.host_address = f"{self.subnet}.1"
        self.bridge = f"mrlb{self.tag}"
        self.nodes = [Node(f"n{i}", f"mrl{self.tag}n{i}", f"{self.subnet}.{10 + i}") for i in range(1, count + 1)]

    def __enter__(self) -> Self:
        try:
            ip("link", "add", self.bridge, "type", "bridge")
            ip("addr", "add", f"{self.host_address}/24", "dev", self.bridge)
            ip("link", "set", self.bridge, "up")
            for number, node in enumerate(self.nodes, 1):
                outside = self._link(number)
                ip("netns", "add", node.namespace)
                ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
                ip("link", "set", outside, "master", self.bridge, "up")
                ip("-n", node.namespace, "link", "set", "lo", "up")
                ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
                ip("-n", node.namespace, "link", "set", "eth0", "up")
                ip("-n", node.namespace, "route", "add", "default", "via", self.host_address)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _link(self, number: int) -> str:
        """This machine's end of the cable of node n1, n2, …"""
        return f"mrlv{self.tag}{number}"

    def connect(self, number: int, *, is_up: bool) -> None:
        """Plug the cable of node n1, n2, … in, or pull it."""
        ip("link", "set", self._link(number), "up" if is_up else "down")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for node in self.nodes:
            with contextlib.suppress(RuntimeError):
                ip("netns", "del", node.namespace)
        with contextlib.suppress(RuntimeError):
            ip("link", "del", self.bridge)
