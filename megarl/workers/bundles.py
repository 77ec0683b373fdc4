"""The bundles of Ray's reservation: on which node each is and which GPU it has, asked of processes inside them.

Every process of a run on GPUs sees all GPUs of its node and is told which is its own: tensors that one process shares with
another by CUDA IPC can be opened only by a process that sees the GPU they are on.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.errors import ClusterError, DeadlineError
from megarl.reshard.placement import Bundle

SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Keeps Ray from narrowing `CUDA_VISIBLE_DEVICES` to the GPUs that it gives a process; what the node's Ray sees stays."""


def find_bundles(group: PlacementGroup, *, have_gpus: bool, deadline_s: float) -> list[Bundle]:
    """Where the bundles of `group` are, by their numbers.

    Raises:
        ClusterError: a bundle's GPU is not among those that the processes of its node see.
        DeadlineError: some bundle had not answered after `deadline_s`.
    """
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    shared = Counter(addresses[node] for node in set(node_ids.values()))
    names = {node: at if shared[at] < 2 else f"{at}/{node[:8]}" for node, at in addresses.items()}
    gpus = _ask(group, len(node_ids), deadline_s) if have_gpus else [None] * len(node_ids)
    return [Bundle(names[node_ids[number]], gpu) for number, gpu in enumerate(gpus)]


def _ask(group: PlacementGroup, bundles: int, deadline_s: float) -> list[int | None]:
    probe: Any = ray.remote(num_cpus=0, num_gpus=1, max_retries=0, runtime_env={"env_vars": SEES_ALL_GPUS})(own_gpu)
    asked = [
        probe.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        ).remote()
        for number in range(bundles)
    ]  # fmt: skip
    _, late = ray.wait(asked, num_returns=bundles, timeout=deadline_s)
    if late:
        raise DeadlineError(f"{len(late)} of {bundles} GPUs had not answered after {deadline_s:.0f} s; look at their nodes")
    try:
        return ray.get(asked)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def own_gpu() -> int | None:
    """The number of the GPU that Ray gave this process, among those that it sees; None if it gave none."""
    given = ray.get_gpu_ids()
    return gpu_number(given[0], os.environ.get("CUDA_VISIBLE_DEVICES")) if given else None


def gpu_number(gpu: int | str, visible: str | None) -> int:
    """The number by which CUDA knows what Ray calls `gpu`, in a process whose `CUDA_VISIBLE_DEVICES` is `visible`.

    Raises:
        ClusterError: `gpu` is not among those that are visible.
    """
    if visible is None:
        return int(gpu)
    names = [name.strip() for name in visible.split(",")]
    if str(gpu) not in names:
        raise ClusterError(
            f"Ray gave GPU {gpu}, which is not among CUDA_VISIBLE_DEVICES='{visible}'; start Ray with the same "
            "CUDA_VISIBLE_DEVICES on the whole node, or without"
        )
    return names.index(str(gpu))
