"""Places and processes for ranks that replace lost ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.layout import Layout
from megarl.errors import ClusterError
from megarl.options.elastic.replicas import Block, Replicas
from megarl.weights.placement import Bundle
from megarl.workers.bundles import find_bundles
from megarl.workers.cluster import Cluster
from megarl.workers.group import WorkerGroup
from megarl.workers.rank_actor import RankActor

WAIT_S = 5.0
"""For Ray to find room for spares; it is there or it is not."""
FAULTY_AFTER = 2
"""Ranks that one GPU may lose before it is taken to be faulty, though its node answers."""


class Places:
    """The places of a run's ranks, and spare ones, each with a process that waits.

    A rank whose process died takes the place and the process of a spare; a new spare starts at the rank's place, unless that
    is a GPU that has lost several ranks. Where the place is lost with its node and no spare is left, Ray looks for another
    one. Where engines share GPUs with ranks, a rank stays at its place, and spare ones are given to both when a node is lost.
    """

    def __init__(self, cluster: Cluster, spares: int, *, shared: bool, may_be_fewer: bool = False) -> None:
        """`shared`: engines share places with ranks. `may_be_fewer`: where there is no room for so many spares, those are
        reserved for which there is.

        Raises:
            ClusterError: there is no room for so many spares.
        """
        self._cluster, self._shared = cluster, shared
        self._spares: list[tuple[Any, Bundle]] = []
        self._sought: dict[tuple[str, int], tuple[Any, Any]] = {}
        """By group and number of a place that was lost a process there, and its answer once it is."""
        self._reserved: PlacementGroup | None = None
        self._reserved_for: dict[int, tuple[PlacementGroup, int]] = {}
        """By number of a place that is not the run's own reservation's, the one that it is in, and its number there."""
        self._sought_blocks: dict[tuple[int, ...], list[Block]] = {}
        """Places of replicas that the run started without: by number of the replica, and the sizes of its blocks."""
        self._losses: Counter[Bundle] = Counter()
        self.put_aside: list[Bundle] = []
        """GPUs that have lost so many ranks that they are not used again where there are spares."""
        if spares:
            self._reserve(spares, may_be_fewer=may_be_fewer)

    def _reserve(self, spares: int, *, may_be_fewer: bool) -> None:
        have_gpus = self._cluster.platform.name == "cuda"
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if have_gpus else {})
        self._reserved = placement_group([bundle] * spares, strategy="PACK")
        if not self._reserved.wait(timeout_seconds=WAIT_S):
            remove_placement_group(self._reserved)
            self._reserved = None
            have, free = ray.cluster_resources(), ray.available_resources()
            kind = "GPU" if have_gpus else "CPU"
            if may_be_fewer:
                if fits := min(spares - 1, int(free.get(kind, 0))):
                    self._reserve(fits, may_be_fewer=True)
                return
            raise ClusterError.of(
                "resources.spares",
                spares,
                f"the Ray cluster has no room for: of {have.get(kind, 0):.0f} {kind}s {free.get(kind, 0):.0f} are free",
                allowed=f"at most {int(free.get(kind, 0))}, 0 or null",
                rule="the Ray cluster has no room for",
            )
        if self._shared:
            return  # they wait for a node to be lost: what is started there goes with the reservation
        bundles = find_bundles(self._reserved, have_gpus=have_gpus, deadline_s=self._cluster.start_deadline_s)
        for number, at in enumerate(bundles):
            strategy = PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=number)
            where = self._cluster.where(None, 1) | {"num_cpus": 1, "num_gpus": int(have_gpus), "scheduling_strategy": strategy}
            self._spares.append((self._start("spare", number, Layout(), 1, where), at))

    def _start(self, name: str, rank: int, layout: Layout, threads: int, where: dict[str, Any]) -> Any:
        arguments = self._cluster.log_folder, name, rank, layout, threads, self._cluster.architecture
        return RankActor.options(**where).remote(*arguments)

    def replace(self, group: WorkerGroup, ranks: Mapping[int, bool], damaged: Container[int], wait_s: float) -> list[int]:
        """Have other processes for these ranks of a group, whose own are ended; by rank whether its node is there.

        The places of `damaged` ones are not used again where there are spares. Returns the ranks for which there was no place
        after `wait_s`.
        """
        homeless = []
        for rank, is_there in ranks.items():
            ray.kill(group.actors[rank], no_restart=True)
            number = self._cluster.placement.ranks[group.name][rank]
            if self._spares:
                before = self._cluster.placement.bundles[number]
                group.actors[rank], at = self._spares.pop(0)
                self._move(number, at)
                if is_there and rank not in damaged and not self._is_faulty(before):
                    self._spares.append((self._start("spare", number, Layout(), 1, self._where(number, 1)), before))
                continue
            if not is_there and self._reserved is not None:
                remove_placement_group(self._reserved)  # Ray moves the lost places of ranks and engines there
                self._reserved = None
            if is_there:
                group.actors[rank] = self._start_rank(group, rank, number)
            elif not self._find(group, rank, number, wait_s):
                homeless.append(rank)
        return homeless

    def _is_faulty(self, place: Bundle) -> bool:
        """Count a loss at a place; return whether it is a GPU that has lost too many."""
        self._losses[place] += 1
        if place.gpu is None or self._losses[place] < FAULTY_AFTER:
            return False
        self.put_aside.append(place)
        return True

    def _start_rank(self, group: WorkerGroup, rank: int, number: int) -> Any:
        threads = self._cluster.threads_of(group.name)
        return self._start(group.name, rank, group.layout, threads, self._where(number, threads))

    def _where(self, number: int, threads: int) -> dict[str, Any]:
        where = self._cluster.where(number, threads)
        if number in self._reserved_for:
            where["scheduling_strategy"] = PlacementGroupSchedulingStrategy(*self._reserved_for[number])
        return where

    def _find(self, group: WorkerGroup, rank: int, number: int, wait_s: float) -> bool:
        """Start a rank wherever Ray moves its place to; Ray itself may take a while to notice that the node is lost."""
        ends_at = time.monotonic() + wait_s
        while (left_s := ends_at - time.monotonic()) > 0:
            group.actors[rank] = self._start_rank(group, rank, number)
            asked = group.actors[rank].__ray_call__.remote(_whereabouts)
            try:
                self._move(number, ray.get(asked, timeout=left_s))
                return True
            except ray.exceptions.RayActorError:
                continue  # on the lost node
            except TimeoutError:
                break
        ray.kill(group.actors[rank], no_restart=True)
        return False

    def assign(self, group: str, numbers: Sequence[int]) -> None:
        """Give the ranks of a group, which are numbered anew, the places of these numbers."""
        placement = self._cluster.placement
        self._cluster.placement = replace(placement, ranks={**placement.ranks, group: tuple(numbers)})

    def found(self, group: WorkerGroup, missing: Sequence[int]) -> dict[int, Any]:
        """Processes for a group, by the numbers of `missing` places at which they are by now; nothing is waited for.

        Those that are not there yet are sought on; `take` says which are used.
        """
        threads = self._cluster.threads_of(group.name)
        for number in missing:
            if (group.name, number) not in self._sought:
                actor = self._start("spare", number, Layout(), 1, self._where(number, threads))
                self._sought[group.name, number] = actor, actor.__ray_call__.remote(_whereabouts)
        asked = {number: self._sought[group.name, number][1] for number in missing}
        there = ray.wait([*asked.values()], num_returns=len(asked), timeout=0)[0] if asked else []
        processes = {}
        for number, answer in asked.items():
            if answer in there:
                try:
                    self._move(number, ray.get(answer))
                    processes[number] = self._sought[group.name, number][0]
                except ray.exceptions.RayActorError:
                    self.take(group, [number])
        return processes

    def seek_replicas(self, group: WorkerGroup, layout: Layout) -> Replicas:
        """Have Ray look for places for the replicas that `layout` has and the group has not: for each by itself, and by blocks
        on one machine like those of the group's first replica.

        Returns the places of all replicas, those of the group first.
        """
        placement = self._cluster.placement
        own = Replicas.of(group.layout, placement.ranks[group.name], lambda at: placement.bundles[at].node)
        sizes = [len(block) for block in own.blocks[0]]
        for missing in range(layout.dp - group.layout.dp):
            # where groups share GPUs, so do their new replicas
            shared = self._sought_blocks.get((missing, *sizes)) if self._shared else None
            blocks = shared or [self._seek_block(size) for size in sizes]
            self._sought_blocks[missing, *sizes] = blocks
            own.blocks.append([*blocks])
        return Replicas(layout, own.blocks)

    def _seek_block(self, size: int) -> Block:
        have_gpus = self._cluster.platform.name == "cuda"
        reserved = placement_group([{"CPU": 1.0} | ({"GPU": 1.0} if have_gpus else {})] * size, strategy="STRICT_PACK")
        self._cluster.reservations.append(reserved)
        placement = self._cluster.placement
        numbers = range(len(placement.bundles), len(placement.bundles) + size)
        self._reserved_for |= {number: (reserved, index) for index, number in enumerate(numbers)}
        unknown = Bundle(placement.bundles[0].node, None)  # until they are found
        self._cluster.placement = replace(placement, bundles=(*placement.bundles, *[unknown] * size))
        return tuple(numbers)

    def take(self, group: WorkerGroup, numbers: Iterable[int]) -> None:
        """Seek no processes for these places any more: they are used, or gone."""
        for number in numbers:
            del self._sought[group.name, number]

    def _move(self, number: int, at: Bundle) -> None:
        placement = self._cluster.placement
        bundles = (*placement.bundles[:number], at, *placement.bundles[number + 1 :])
        self._cluster.placement = replace(placement, bundles=bundles)


def _whereabouts(process: Any) -> Bundle:
    return Bundle(ray.util.get_node_ip_address(), process.rank.gpu if process.rank.platform.name == "cuda" else None)
