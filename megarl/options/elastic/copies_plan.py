"""Bytes of the checkpoints that a planned run keeps in its nodes' memory, and seconds that they take. Without torch and Ray.

Of each rank's part two checkpoints are in shared memory of its node and of the node's buddy; ranks write them in place.
Buddies are neighbours in an order that only Ray knows, so another node's files count as those of the fullest other node.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megarl.options.elastic.section import spares_of
from megarl.planning.gpus import GPUS_PER_NODE
from megarl.planning.memory import REMAINDER_BYTES, checkpoint_bytes, precision_of
from megarl.planning.plan import CapacityPlan
from megarl.planning.roles import PlannedRole
from megarl.weights.placement import PlacementRequest, place, planned_bundles

SLOTS = 2
"""Checkpoints that a node has of each part: one is whole while the next one is written."""


@dataclass(frozen=True)
class CopiesPlan:
    """Bytes of one checkpoint: `own` of the ranks of the fullest node, `buddys` of those whose files that node has, too, and
    `of_rank` of the fullest rank.

    `nodes` have ranks; a single one has no buddy. `rest` are bytes in main memory of a node besides. `link_bytes_per_s` are
    those of the network between two nodes, `host_bytes_per_s` those from a GPU; a step takes `step_s`.
    """

    own: float
    buddys: float
    of_rank: float
    nodes: int
    rest: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    step_s: float

    @property
    def shared_memory(self) -> float:
        """Bytes of /dev/shm of the fullest node."""
        return SLOTS * (self.own + self.buddys)

    @property
    def sent(self) -> float:
        """Bytes that the fullest node sends after each step."""
        return self.own if self.nodes > 1 else 0.0

    @property
    def main_memory(self) -> float:
        """Bytes of main memory of the fullest node, with what processes keep there."""
        return self.rest + self.shared_memory

    @property
    def copy_s(self) -> float:
        """Seconds in which ranks wait until what they have is copied."""
        return self.of_rank / self.host_bytes_per_s

    @property
    def send_s(self) -> float:
        """Seconds in which the network is busy, beside the next step."""
        return self.sent / self.link_bytes_per_s


def copies_of(plan: CapacityPlan) -> CopiesPlan | None:
    """Plan the checkpoints in memory of a run; None of one that keeps none."""
    config, gpu = plan.run.config, plan.gpu
    if spares_of(config.resources) is None or config.sampling is None:
        return None
    itemsize = precision_of(plan.run, gpu).itemsize
    request = PlacementRequest.of(config)
    placement = place(request, planned_bundles(request.bundles, GPUS_PER_NODE))
    by_node: defaultdict[str, float] = defaultdict(float)
    by_rank: defaultdict[tuple[str, int], float] = defaultdict(float)
    for role in plan.run.roles:
        is_moved = role.name == "reference" and bool(config.reference.reset_every)
        if role.trained is None and not is_moved:
            continue
        by_stage = [_part(role, stage, itemsize, is_moved=is_moved) for stage in range(role.layout.pp)]
        for rank, bundle in enumerate(placement.ranks[role.group]):
            at = role.layout.coords(rank)
            whole, of_first = by_stage[at.pp]
            nbytes = whole + (of_first if at.dp == at.cp == 0 else 0.0)
            by_node[placement.bundles[bundle].node] += nbytes
            by_rank[role.group, rank] += nbytes
    fullest = sorted(by_node.values(), reverse=True)
    share = gpu.efficiencies.links
    return CopiesPlan(
        own=fullest[0],
        buddys=fullest[1] if len(fullest) > 1 else 0.0,
        of_rank=max(by_rank.values()),
        nodes=len(by_node),
        rest=plan.memory.host_bytes_of_a_node,
        link_bytes_per_s=gpu.network_gb_per_s * share * 1e9,
        host_bytes_per_s=gpu.host_gb_per_s * share * 1e9,
        step_s=plan.times.step_seconds,
    )


def _part(role: PlannedRole, stage: int, itemsize: int, *, is_moved: bool) -> tuple[float, float]:
    """Bytes that every rank of a stage contributes, and what those of the first replica do besides."""
    if not is_moved:
        return checkpoint_bytes(role, stage, itemsize), 0.0
    counts, nbytes = role.parameters[stage], itemsize + (REMAINDER_BYTES if role.averaged and itemsize == 2 else 0)
    return counts.expert / role.layout.edp * nbytes, float(counts.dense * nbytes)
