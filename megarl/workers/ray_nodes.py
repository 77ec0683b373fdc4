"""The nodes of a Ray cluster that somebody else started: waiting until all have joined, and running a function on each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.errors import WorkerError

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}


def wait_for_nodes(address: str, nodes: int, gpus: int, deadline_s: float) -> list[str]:
    """Addresses of the nodes, once `nodes` of them with `gpus` GPUs each are alive at `address`.

    Raises:
        WorkerError: they were not after `deadline_s`; says who is there.
    """
    ends_at, reason = time.monotonic() + deadline_s, "nothing answers"
    while time.monotonic() < ends_at:
        try:
            if not ray.is_initialized():
                ray.init(address=address, **_QUIET)
            alive = alive_nodes()
            ready = [node["NodeManagerAddress"] for node in alive if node["Resources"].get("GPU", 0) >= gpus]
            if len(ready) >= nodes:
                return sorted(ready)
            short = sorted({node["NodeManagerAddress"] for node in alive} - set(ready))
            reason = f"{len(ready)} of {nodes} nodes have joined" + (f"; fewer than {gpus} GPUs: {short}" if short else "")
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
        time.sleep(0.5)
    raise WorkerError(f"the Ray at {address} was not complete after {deadline_s:.0f} s: {reason}")


def on_every_node(address: str, function: Callable[..., Any], arguments: tuple[Any, ...], deadline_s: float) -> list[Any]:
    """`function(number, count, *arguments)` in a process on every node of the Ray at `address`, at the same time; in order.

    Raises:
        WorkerError: no Ray answers, or some node had no result after `deadline_s`.
    """
    try:
        ray.init(address=address, ignore_reinit_error=True, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerError(f"no Ray cluster answers at {address}: {str(error).splitlines()[0]}") from error
    alive = alive_nodes()
    return on_nodes(alive, function, [(number, len(alive), *arguments) for number in range(len(alive))], deadline_s)


def on_nodes(
    nodes: Sequence[Mapping[str, Any]], function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], deadline_s: float
) -> list[Any]:
    """`function(*arguments)` in a process on each of `nodes` with its own arguments, at the same time; in order.

    Raises:
        WorkerError: some node had no result after `deadline_s`.
    """
    if not nodes:
        return []
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    answers = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(*of_node)
        for node, of_node in zip(nodes, arguments, strict=True)
    ]
    _, late = ray.wait(answers, num_returns=len(answers), timeout=deadline_s)
    if late:
        names = [nodes[answers.index(reference)]["NodeManagerAddress"] for reference in late]
        raise WorkerError(f"after {deadline_s:.0f} s {', '.join(names)} had not answered; look at these nodes first")
    try:
        return ray.get(answers)
    except ray.exceptions.RayError as error:
        raise WorkerError(f"a node failed to answer:\n{error}") from error


def alive_nodes() -> list[dict[str, Any]]:
    """The nodes of this process's Ray that are alive, by their addresses."""
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))
