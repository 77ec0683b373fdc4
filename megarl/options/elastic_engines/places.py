"""Places of engines that come: each is a reservation of its own, which Ray gives when and where it has room."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.weights.placement import Bundle, PlacementRequest, place
from megarl.workers.bundles import find_bundles
from megarl.workers.cluster import Cluster


@dataclass(frozen=True)
class EnginePlaceFound:
    """A reservation that Ray has given: the id and the name of its node, and its GPUs there, if there are such."""

    group: PlacementGroup
    node_id: str
    node: str
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nodes:
    """The nodes that Ray has now: their names by id, and the ids of those that Ray has been told to drain."""

    names: dict[str, str]
    draining: frozenset[str]

    @classmethod
    def now(cls) -> Nodes:
        """Ask Ray. A node is called by its address; several on one machine by what their id begins with, too."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        shared = Counter(addresses.values())
        names = {node: at if shared[at] < 2 else f"{at}/{node[:8]}" for node, at in addresses.items()}
        return cls(names, frozenset(ray_state.get_draining_nodes()))


class EnginePlaces:
    """The reservations of a run's engines, of `size` GPUs of one node each; one at a time is asked for."""

    def __init__(self, cluster: Cluster, size: int) -> None:
        self._cluster, self._size = cluster, size
        self._have_gpus = cluster.platform.name == "cuda"
        self._sought: PlacementGroup | None = None

    @property
    def seeks(self) -> bool:
        """Return whether a place has been asked for that is not found yet."""
        return self._sought is not None

    def seek(self) -> None:
        """Ask Ray for a further place, unless one is sought."""
        if self._sought is None:
            bundle = {"CPU": 1.0} | ({"GPU": 1.0} if self._have_gpus else {})
            self._sought = placement_group([bundle] * self._size, strategy="STRICT_PACK")
            self._cluster.reservations.append(self._sought)

    def found(self, nodes: Nodes) -> EnginePlaceFound | None:
        """Take the place that was sought, if Ray has given it and its node is there; nothing is waited for."""
        if self._sought is None:
            return None
        told = placement_group_table(self._sought)
        node_id = {*told["bundles_to_node_id"].values()}
        if told["state"] != "CREATED" or len(node_id) != 1 or not node_id <= nodes.names.keys():
            return None
        group, self._sought = self._sought, None
        [of_node] = node_id
        return EnginePlaceFound(group, of_node, nodes.names[of_node])

    def with_gpus(self, at: EnginePlaceFound) -> EnginePlaceFound:
        """Ask the place for its GPUs.

        Raises:
            ClusterError: they are not evenly spaced, as an engine's must be.
        """
        if not self._have_gpus:
            return at
        bundles = find_bundles(at.group, have_gpus=True, deadline_s=self._cluster.start_deadline_s)
        placed = place(PlacementRequest({}, 1, self._size, colocated=False, over_nodes=False), bundles)
        return replace(at, gpus=placed.gpus(placed.engines[0]))

    def where(self, at: EnginePlaceFound, threads: int) -> dict[str, Any]:
        """Ray's options for an actor there."""
        strategy = PlacementGroupSchedulingStrategy(at.group, placement_group_bundle_index=0)
        taken = {"num_cpus": 1, "num_gpus": int(self._have_gpus), "scheduling_strategy": strategy}
        return self._cluster.where(None, threads) | taken

    def bundles(self, at: EnginePlaceFound) -> list[Bundle]:
        """The bundles of a place."""
        return [Bundle(at.node, gpu) for gpu in at.gpus or (None,)]

    def give_back(self, at: EnginePlaceFound) -> None:
        """End what is there, and let others have the room."""
        remove_placement_group(at.group)
        self._cluster.reservations.remove(at.group)
