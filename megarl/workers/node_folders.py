"""A folder that processes on several machines read and write by its path: whether all of them see the same one."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

LOOK_S = 60.0
"""For a machine to look."""


def machines_without(folder: Path, machines: Collection[str]) -> list[str]:
    """Those of `machines`, addresses of Ray's nodes, that do not see a file that is written to `folder` here.

    Raises:
        ray.exceptions.GetTimeoutError: a machine did not answer.
    """
    mark = folder.resolve() / f".seen-{secrets.token_hex(8)}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_sees)
    try:
        nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
        asked = {
            machine: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[machine], soft=False)).remote(
                str(mark)
            )
            for machine in sorted(machines)
            if machine in nodes
        }
        answers = ray.get([*asked.values()], timeout=LOOK_S)
        return [machine for machine, sees in zip(asked, answers, strict=True) if not sees]
    finally:
        mark.unlink()


def _sees(path: str) -> bool:
    return Path(path).exists()
