"""The checkpoints that a run has in its nodes' memory, as the driver keeps them."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.checkpoint.dist_writer import Written
from megarl.checkpoint.format.dist_format import COMMON
from megarl.errors import ClusterError, DeadlineError, WorkerError
from megarl.options.elastic.node_memory import SHARED_MEMORY, NodeMemoryActor
from megarl.options.elastic.rank_memory import KeepInMemory, NodeFolder, PutBack, bytes_in_memory
from megarl.workers.group import WorkerGroup, wait_for
from megarl.workers.rank_calls import RankCalls
from megarl.workers.roles import Roles

if TYPE_CHECKING:
    from megarl.options.elastic.shared_file import KeptPart

UNKNOWN = ""
"""In place of a node's name."""
SLOTS = ("0", "1")
"""One checkpoint is whole while the next one is written."""
FINISH_S = 10.0
"""For the last pieces of a checkpoint to be written, when a rank is lost meanwhile."""
LOOK_S = 3.0
"""For nodes to say that they are there."""
Moment = tuple[int, int]
"""Steps done, and rollbacks: when nothing of a role changes between two, it is the same."""


@dataclass
class WholeInMemory:
    """A checkpoint in memory: of which moment, in which slot, and which nodes have each rank's files."""

    moment: Moment
    slot: str
    layout_of: Mapping[str, Sequence[str]]
    """By role the node of each rank that wrote."""
    buddies: Mapping[str, str | None]
    written: Mapping[str, Sequence[Written]]
    """By role what each rank wrote."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """By node that has a buddy the answer when that has its files, too."""

    def files(self) -> dict[str, dict[str, int]]:
        """By node the files that its ranks wrote, by their paths in the slot, with their bytes."""
        files: dict[str, dict[str, int]] = {node: {} for node in self.buddies}
        for role, nodes in self.layout_of.items():
            for node, written in zip(nodes, self.written[role], strict=True):
                files[node] |= {f"{role}/{name}": record.bytes for name, record in written.files.items()}
        return files


@dataclass(frozen=True)
class CopyCost:
    """Bytes that all ranks copied for a checkpoint, bytes that their nodes sent, and the processors' seconds for both."""

    copied_bytes: int = 0
    sent_bytes: int = 0
    copies_cpu_s: float = 0.0


class Memory:
    """At most one whole checkpoint, and one in the making."""

    def __init__(self, roles: Roles, deadline_s: float) -> None:
        self._roles, self._deadline_s = roles, deadline_s
        self._nodes: dict[str, NodeFolder] = {}
        self._node_of: dict[str, list[str]] = {}
        self.kept: WholeInMemory | None = None
        self._writing: WholeInMemory | None = None
        self._alive: set[str] = set()
        self.cost = CopyCost()
        """Of the checkpoint that was begun last."""

    def find_nodes(self) -> None:
        """Look where ranks are, and have memory on each of their nodes."""
        for name, group in self._roles.groups.items():
            assert isinstance(group, WorkerGroup)
            asked = [actor.__ray_call__.remote(_node_id) for actor in group.actors]
            names = [f"rank {rank} of {name}" for rank in range(len(asked))]
            self._node_of[name] = wait_for(asked, phase="memory", deadline_s=self._deadline_s, whose=names)
        for node in sorted({node for nodes in self._node_of.values() for node in nodes} - self._nodes.keys()):
            name, here = f"megarl-memory-{secrets.token_hex(8)}", NodeAffinitySchedulingStrategy(node, soft=False)
            actor = NodeMemoryActor.options(scheduling_strategy=here).remote(name)
            self._nodes[node] = NodeFolder(Path(SHARED_MEMORY, name), actor)

    def check_room(self) -> None:
        """Raise ClusterError unless each node's shared memory has room for the checkpoints of its ranks and of its buddy's."""
        needed: Counter[str] = Counter()
        used = self._used()
        buddies = _buddies(used)
        for role in self._roles.changing():
            sizes = self._roles.ask(role, bytes_in_memory)
            for node, size in zip(self._node_of[self._roles.group_of(role).name], sizes, strict=True):
                for holder in {node, buddies[node] or node}:
                    needed[holder] += len(SLOTS) * size
        free = self._wait([self._nodes[node].actor.free_bytes.remote() for node in used])
        for node, has in zip(used, free, strict=True):
            if has < needed[node]:
                raise ClusterError(
                    f"resources.spares keeps {_gib(needed[node])} of checkpoints in {SHARED_MEMORY} of a node, which has "
                    f"{_gib(has)} free; give it more, use more nodes, or set resources.spares to null"
                )

    def _used(self) -> list[str]:
        return sorted({node for nodes in self._node_of.values() for node in nodes})

    def begin(self, moment: Moment) -> None:
        """Have every role that changes copied, as it is now, unless that has been done; on return it may change again."""
        if self._writing is not None:
            self.finish()
        if self.kept is not None and self.kept.moment == moment:
            return
        slot = next(slot for slot in SLOTS if self.kept is None or slot != self.kept.slot)
        used = self._used()
        groups = {role: self._roles.group_of(role) for role in self._roles.changing()}
        layout_of = {role: list(self._node_of[group.name]) for role, group in groups.items()}
        buddies = _buddies(used)
        names = _names(used, layout_of)
        others = {buddy: names[node] for node, buddy in buddies.items() if buddy is not None}
        self._wait([self._nodes[node].actor.begin.remote(slot, names[node], others.get(node, ())) for node in used])
        submitted = {
            role: group.submit(RankCalls.ask, [(role, KeepInMemory(role, slot, self._nodes[node])) for node in layout_of[role]])
            for role, group in groups.items()
        }
        parts: dict[str, list[KeptPart]] = {
            role: groups[role].wait(asked, phase="checkpoint in memory", deadline_s=self._deadline_s)
            for role, asked in submitted.items()
        }
        every = [part for of_role in parts.values() for part in of_role]
        self.cost = CopyCost(sum(part.copied_bytes for part in every), 0, sum(part.cpu_s for part in every))
        written = {role: [part.written for part in of_role] for role, of_role in parts.items()}
        whole = WholeInMemory(moment, slot, layout_of, buddies, written)
        files = whole.files()
        asked = {
            node: self._nodes[node].actor.complete.remote(slot, files[node], self._nodes[buddy].actor)
            for node, buddy in buddies.items()
            if buddy is not None
        }
        self._writing = replace(whole, asked=asked)

    def finish(self, deadline_s: float | None = None) -> None:
        """Wait until the checkpoint in the making is on two nodes, where there are two; the one before is kept until then.

        Raises:
            WorkerError: a node is lost, and its buddy does not have all of its files.
        """
        if self._writing is None:
            return
        whole, self._writing = self._writing, None
        ends_at = time.monotonic() + (deadline_s or self._deadline_s)
        for node, answer in whole.asked.items():
            try:
                [sent] = self._wait([answer], max(ends_at - time.monotonic(), 0.1))
            except WorkerError:
                if not self._is_at_buddy(whole, node):
                    raise
                continue
            cost = self.cost
            self.cost = CopyCost(cost.copied_bytes, cost.sent_bytes + sent.bytes, cost.copies_cpu_s + sent.cpu_s)
        self.kept = whole

    def _is_at_buddy(self, whole: WholeInMemory, node: str) -> bool:
        """Return whether the buddy of a node that is lost has its files."""
        buddy = whole.buddies[node]
        assert buddy is not None, "it was asked"
        try:
            [has_all] = self._wait([self._nodes[buddy].actor.has.remote(whole.slot, [*whole.files()[node]])], LOOK_S)
        except (WorkerError, DeadlineError):
            return False
        return bool(has_all)

    def finish_soon(self) -> None:
        """Finish the checkpoint in the making, if two nodes have what was lost since; else give it up."""
        with suppress(WorkerError, DeadlineError):
            self.finish(FINISH_S)

    def put_back(self) -> None:
        """Read every role from the whole checkpoint, on ranks that may be on other nodes than those that wrote it.

        Raises:
            WorkerError: of some rank both nodes are gone.
        """
        assert self.kept is not None, "asked for before"
        kept = self.kept
        self.find_nodes()
        here = self._used()
        self._write_contents(kept, here)
        self._alive |= {*here}
        for role, wrote in kept.layout_of.items():
            group = self._roles.group_of(role)
            having = ray.put(  # once for all ranks: of each it has an entry
                [
                    {
                        node: self._nodes[node].actor
                        for node in (at, kept.buddies[at])
                        if node is not None and node in self._alive
                    }
                    for at in wrote
                ]
            )
            of_node = {node: PutBack(role, kept.slot, self._nodes[node], node, having) for node in here}
            arguments = [(role, of_node[node]) for node in self._node_of[group.name]]
            group.wait(group.submit(RankCalls.ask, arguments), phase="state from memory", deadline_s=self._deadline_s)

    def look(self) -> bool:
        """See which nodes answer; whether of every rank's files one has them, of this checkpoint."""
        asked = {node: folder.actor.free_bytes.remote() for node, folder in self._nodes.items()}
        ray.wait([*asked.values()], num_returns=len(asked), timeout=LOOK_S)
        self._alive = set()
        for node, answer in asked.items():
            try:
                ray.get(answer, timeout=0)
                self._alive.add(node)
            except (ray.exceptions.RayError, TimeoutError):
                continue
        kept = self.kept
        return kept is not None and all(
            {node, kept.buddies[node]} & self._alive for nodes in kept.layout_of.values() for node in nodes
        )

    def is_there(self, group: str, rank: int) -> bool:
        """Return whether the node of a rank answered when it was last looked at; one that is not known yet is taken to."""
        node = self._node_of[group][rank]
        return node == UNKNOWN or node in self._alive

    def renumber(self, group: str, before: Sequence[int | None]) -> None:
        """Have the ranks of a group be where these were before; None: a process that is new, on a node not known yet."""
        nodes = self._node_of[group]
        self._node_of[group] = [UNKNOWN if rank is None else nodes[rank] for rank in before]

    def _write_contents(self, kept: WholeInMemory, nodes: Iterable[str]) -> None:
        firsts = {}
        for role, (first, *_) in kept.layout_of.items():
            having = first if first in self._alive or not self._alive else kept.buddies[first]
            assert having is not None, "one of both is there"
            firsts[role] = self._nodes[having].actor
        self._wait([self._nodes[node].actor.finish.remote(kept.slot, kept.written, firsts) for node in nodes])

    def _wait(self, asked: Sequence[Any], deadline_s: float | None = None) -> list[Any]:
        names = [f"the memory of node {number}" for number in range(len(asked))]
        return wait_for(asked, phase="checkpoint in memory", deadline_s=deadline_s or self._deadline_s, whose=names)


def _buddies(nodes: Sequence[str]) -> dict[str, str | None]:
    """By node the one that has its files, too: the next one; None of a single one."""
    return dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True)) if len(nodes) > 1 else dict.fromkeys(nodes)


def _names(used: Sequence[str], layout_of: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """By node the names of the files that its ranks write, in a slot."""
    names: dict[str, set[str]] = {node: set() for node in used}
    for role, nodes in layout_of.items():
        for rank, node in enumerate(nodes):
            names[node] |= {f"{role}/__{rank}_0.distcp", *((f"{role}/{COMMON}",) if rank == 0 else ())}
    return names


def _gib(size: int) -> str:
    """A size in words."""
    return f"{size / 2**30:.3g} GiB"


def _node_id(process: object) -> str:
    return str(ray.get_runtime_context().get_node_id())
