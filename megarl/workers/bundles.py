"""The bundles of Ray's reservation: on which node each is and which GPU it has, asked of processes inside them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.errors import DeadlineError
from megarl.weights.placement import Bundle
from megarl.workers.own_gpu import SEES_ALL_GPUS, own_gpu


def find_bundles(group: PlacementGroup, *, have_gpus: bool, deadline_s: float) -> list[Bundle]:
    """Find where the bundles of `group` are, by their numbers.

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
    references = [
        probe.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        ).remote()
        for number in range(bundles)
    ]  # fmt: skip
    _, late = ray.wait(references, num_returns=bundles, timeout=deadline_s)
    if late:
        raise DeadlineError(f"{len(late)} of {bundles} GPUs had not answered after {deadline_s:.0f} s; look at their nodes")
    try:
        return ray.get(references)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
