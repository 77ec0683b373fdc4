"""A folder that processes on several machines read and write by its path: whether all of them see the same one."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path

from megarl.workers.ray_nodes import alive_nodes, on_nodes

LOOK_S = 60.0
"""For a machine to look."""


def machines_without(folder: Path, machines: Collection[str]) -> list[str]:
    """Find which of `machines`, addresses of Ray's nodes, do not see a file that is written to `folder` here.

    Raises:
        WorkerError: a machine did not answer.
    """
    mark = folder.resolve() / f".seen-{secrets.token_hex(8)}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        nodes = [node for node in alive_nodes() if node["NodeManagerAddress"] in machines]
        answers = on_nodes(nodes, _sees, [(str(mark),)] * len(nodes), LOOK_S)
        return [node["NodeManagerAddress"] for node, sees in zip(nodes, answers, strict=True) if not sees]
    finally:
        mark.unlink()


def _sees(path: str) -> bool:
    return Path(path).exists()
