"""The files by which nodes leave a run: it tells where its engines are, and who knows that a node will go asks it to leave."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from megarl.errors import ConfigError, DeadlineError, either
from megarl.observe.record_types import checked_file
from megarl.system.atomic_files import write_text_atomically

ENGINES = "engines.json"
"""File of the run's folder: the nodes that Ray has by id, and the engines."""
LEAVING = "leaving_nodes"
"""Folder in it: an empty file for each node that is asked to leave, until its engines have left."""
POLL_S = 0.2


def tell(folder: Path, names: Mapping[str, str], engines: Sequence[Mapping[str, Any]]) -> None:
    """Write where the engines are, for a run that has a folder."""
    if folder.is_dir():
        write_text_atomically(folder / ENGINES, json.dumps({"nodes": dict(names), "engines": list(engines)}, indent=1) + "\n")


def asked_to_leave(folder: Path) -> dict[str, Path]:
    """The nodes, by name or id, that are asked to leave, and the file of each."""
    requests = folder / LEAVING
    return {unquote(file.name): file for file in requests.iterdir()} if requests.is_dir() else {}


def ask_to_leave(folder: Path, node: str, wait_s: float) -> list[int]:
    """Ask a node's engines to leave the run in `folder`, and wait until they have; returns their numbers.

    Raises:
        ConfigError: the run's engines do not come and go, or it has no such node.
        DeadlineError: the run has not answered after `wait_s` seconds.
    """
    try:
        told = checked_file(folder / ENGINES)
    except FileNotFoundError:
        why = "which nodes can leave whose rollout.engines has min and max, once it has started"
        raise ConfigError(f"{folder} has no {ENGINES}, so it is no run {why}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / ENGINES} is damaged or not of a run ({error}); the run writes it anew when it starts"
        ) from None
    nodes: dict[str, str] = told["nodes"]
    if node not in {*nodes, *nodes.values()}:
        raise ConfigError(f"the run in {folder} has no node '{node}'; it must be {either(sorted(nodes.values()))}")
    leaving = [engine["number"] for engine in told["engines"] if node in (engine["node"], engine["node_id"])]
    request = folder / LEAVING / quote(node, safe="")
    request.parent.mkdir(exist_ok=True)
    request.touch()
    ends_at = time.monotonic() + wait_s
    while request.exists():
        if time.monotonic() > ends_at:
            late = f"the run in {folder} has not let node '{node}' go within {wait_s:.0f} s; does it run?"
            raise DeadlineError(late)
        time.sleep(POLL_S)
    return leaving
