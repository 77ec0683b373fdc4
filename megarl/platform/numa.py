"""The cores near a GPU, and binding this process to them: memory that it pins is then near the GPU too.

Reads sysfs, so Linux only; where it does not say, nothing is bound.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set as AbstractSet
from pathlib import Path

SYSFS, TASKS = Path("/sys"), Path("/proc/self/task")


def cores_near(pci_address: str, root: Path = SYSFS) -> frozenset[int]:
    """The cores of the NUMA node of a PCI device, such as `0000:3b:00.0`; none where the machine does not say.

    `root` is where sysfs is.
    """
    try:
        node = int((root / "bus/pci/devices" / pci_address / "numa_node").read_text())
        if node < 0:  # the firmware does not say, or there is one node only
            return frozenset()
        return cores_of((root / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def cores_of(listed: str) -> frozenset[int]:
    """The numbers in a list such as `0-3,8-11`."""
    ends = [part.split("-") for part in listed.strip().split(",") if part]
    return frozenset(core for first, *last in ends for core in range(int(first), int(last[0] if last else first) + 1))


def bind_to(near: AbstractSet[int], tasks: Path = TASKS) -> frozenset[int]:
    """Bind every thread of this process to those cores of `near` that it may use already; returns the cores, if it did.

    A process that may use none of them, or no others, is left as it is. Threads begun later inherit it.
    """
    allowed = os.sched_getaffinity(0)
    cores = allowed & near
    if not cores or cores == allowed:
        return frozenset()
    for thread in sorted(int(task.name) for task in tasks.iterdir()):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if of_thread := os.sched_getaffinity(thread) & cores:
                os.sched_setaffinity(thread, of_thread)
    return frozenset(cores)
