"""The places of a run's ranks and engines: which bundle of the reservation, that is which GPU of which node, each of them has.

Pure values, without torch and Ray: `megarl.workers` finds the bundles and starts processes by a `Placement`, `megarl plan
--placement` makes the bundles up. Everything follows from the bundles that are found, never from their order.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megarl.config import AnyConfig
from megarl.config.engine_kinds import capabilities_of
from megarl.config.layout import Layout, divisors
from megarl.errors import ClusterError, LayoutError, either
from megarl.weights.engine_line import replica_shares

ENGINES = ""
"""The engines' name among those of groups."""


@dataclass(frozen=True)
class Bundle:
    """One place of the reservation: its node, and its GPU's number among those that every process of the node sees.

    `gpu` is None on a cluster without GPUs.
    """

    node: str
    gpu: int | None


@dataclass(frozen=True)
class PlacementRequest:
    """Things to be placed: the layout of each group of ranks, and `engines` engines of `engine_tp` GPUs each.

    Where these have GPUs of their own there may be `lent` further ones, on GPUs of ranks.

    With `engine_tp` 0 the engines are elsewhere, and take no room here. `colocated`: groups and engines share the same GPUs;
    else each has its own. `over_nodes`: whether an engine may be on several nodes, if it is larger than one.
    """

    groups: Mapping[str, Layout]
    engines: int
    engine_tp: int
    colocated: bool
    over_nodes: bool = True
    lent: int = 0

    @classmethod
    def of(cls, config: AnyConfig) -> PlacementRequest:
        """The places that the run of `config` needs under Ray."""
        engines = config.sampling.engines if config.sampling is not None else 0
        engine_tp = config.engine_places // engines if engines else 0
        over_nodes = config.sampling is None or capabilities_of(config.sampling).over_nodes
        lent = config.sampling.lent_engines if config.sampling is not None else 0
        return cls(config.layouts, engines, engine_tp, config.resources.placement == "colocated", over_nodes, lent)

    @property
    def bundles(self) -> int:
        """Bundles that are needed."""
        sizes = [*(layout.world_size for layout in self.groups.values()), self.engines * self.engine_tp]
        return max(sizes) if self.colocated else sum(sizes)

    @property
    def processes_per_bundle(self) -> int:
        """Processes that share a bundle, at most."""
        return len(self.groups) + 1 if self.colocated else 1 + bool(self.lent)


@dataclass(frozen=True)
class Placement:
    """`ranks[group][rank]` is a rank's bundle, `engines[engine][rank]` the bundle of an engine's rank; numbers of `bundles`.

    The bundles of an engine are on one node and their GPUs evenly spaced, mostly neighbours; one that is larger than a node has
    equally many of each of several nodes, one after the other. Engines elsewhere have none. Those that are lent GPUs come last.
    """

    bundles: tuple[Bundle, ...]
    ranks: Mapping[str, tuple[int, ...]]
    engines: tuple[tuple[int, ...], ...]

    def engine_nodes(self, engine: int) -> list[tuple[int, ...]]:
        """The bundles of an engine by node, in the order of its ranks; none of one that is elsewhere."""
        of_nodes: dict[str, list[int]] = {}
        for bundle in self.engines[engine]:
            of_nodes.setdefault(self.bundles[bundle].node, []).append(bundle)
        return [tuple(bundles) for bundles in of_nodes.values()]

    def gpus(self, bundles: Iterable[int]) -> tuple[int, ...]:
        """The GPUs of bundles of one node, by their numbers there; none on a cluster without GPUs."""
        numbers = (self.bundles[bundle].gpu for bundle in bundles)
        return tuple(gpu for gpu in numbers if gpu is not None)

    @property
    def gpu_count(self) -> int:
        """GPUs that ranks and engines have; 0 on a cluster without any."""
        return sum(bundle.gpu is not None for bundle in self.bundles)

    @property
    def machines(self) -> set[str]:
        """The machines that have bundles. Nodes of one Ray on one machine are told apart by what follows its address."""
        return set(map(machine, self.nodes))

    @property
    def nodes(self) -> list[str]:
        """The nodes that have bundles, in the order in which they are filled."""
        return list(_by_node(self.bundles))

    def ranks_by_node(self, group: str) -> list[list[int]]:
        """The ranks of a group on each node that has some."""
        of_nodes: dict[str, list[int]] = {}
        for rank, bundle in enumerate(self.ranks[group]):
            of_nodes.setdefault(self.bundles[bundle].node, []).append(rank)
        return [*of_nodes.values()]

    def ranks_per_node(self, group: str) -> int:
        """Ranks of a group on the node that has most of them."""
        return max(map(len, self.ranks_by_node(group)))

    def as_json(self) -> dict[str, Any]:
        """All of it, for `placement.json`."""

        def place(bundle: int) -> dict[str, Any]:
            return {"bundle": bundle, "node": self.bundles[bundle].node, "gpu": self.bundles[bundle].gpu}

        return {
            "nodes": self.nodes,
            "ranks": {name: [place(bundle) for bundle in bundles] for name, bundles in self.ranks.items()},
            "engines": [[place(bundle) for bundle in bundles] for bundles in self.engines],
        }

    def summary(self) -> str:
        """One line for the start of a run."""
        sizes = Counter(bundle.node for bundle in self.bundles)
        kind = "GPUs" if any(bundle.gpu is not None for bundle in self.bundles) else "CPU places"
        group_nodes = [f"{name} {ranges(self._numbers_of_nodes(bundles))}" for name, bundles in self.ranks.items()]
        inside = [bundle for bundles in self.engines for bundle in bundles]
        if inside:
            group_nodes.append(f"engines {ranges(self._numbers_of_nodes(inside))}")
        each = ranges(sizes.values(), " to ")
        nodes = f"1 node with {each} {kind}" if len(sizes) == 1 else f"{len(sizes)} nodes with {each} {kind} each"
        return f"{nodes}; by node: {', '.join(group_nodes)}"

    def rows(self) -> list[tuple[str, str, dict[str, str]]]:
        """(node, its GPUs, the ranks or engines there by group) of every node, as ranges."""
        rows = []
        for node, bundles in _by_node(self.bundles).items():
            here, gpus = set(bundles), [self.bundles[bundle].gpu for bundle in bundles]
            numbers_by_group = {
                name: ranges(rank for rank, bundle in enumerate(places) if bundle in here)
                for name, places in self.ranks.items()
            }
            numbers_by_group["engines"] = ranges(
                number for number, places in enumerate(self.engines) if here.intersection(places)
            )
            rows.append((node, ranges(gpu for gpu in gpus if gpu is not None), numbers_by_group))
        return rows

    def _numbers_of_nodes(self, bundles: Iterable[int]) -> list[int]:
        number = {node: at for at, node in enumerate(self.nodes)}
        return sorted({number[self.bundles[bundle].node] for bundle in bundles})


def planned_bundles(gpus: int, gpus_per_node: int) -> list[Bundle]:
    """The bundles of `gpus` GPUs of nodes that have `gpus_per_node` each; the last node may have fewer."""
    return [Bundle(f"node {gpu // gpus_per_node}", gpu % gpus_per_node) for gpu in range(gpus)]


def place(request: PlacementRequest, bundles: Sequence[Bundle]) -> Placement:
    """Give every rank and engine a bundle.

    A tensor-parallel group lies within a node, and so does a context-parallel group where tp * cp ranks fit into one; an
    expert-parallel group does where it can, and stages of the pipeline follow each other from node to node. An engine has
    neighbouring GPUs of one node or, if it is larger than that, as many of each of as few nodes as can hold it; a colocated
    one, as far as possible, those of the ranks that send most weights to it. A cluster without GPUs is one node.

    Raises:
        LayoutError: a tensor- or context-parallel group does not fit into the nodes.
        ClusterError: an engine cannot be shared evenly among nodes, or the nodes have no room for all engines.
    """
    assert len(bundles) >= request.bundles, "as many are reserved as are needed"
    nodes = _Nodes(bundles)
    nodes.check(request)
    try:
        return _place(request, nodes, experts_together=True)
    except (LayoutError, ClusterError):
        return _place(request, nodes, experts_together=False)


def _place(request: PlacementRequest, nodes: _Nodes, *, experts_together: bool) -> Placement:
    """Place large blocks first where nothing is shared: what is left on a node then has room for smaller ones."""
    blocks = [(name, nodes.block_of(layout, experts_together=experts_together)) for name, layout in request.groups.items()]
    blocks += [(ENGINES, nodes.shares_of_engine(request)[0])] if request.engines and request.engine_tp else []
    if not request.colocated:
        blocks.sort(key=lambda block: -block[1])
    ranks: dict[str, tuple[int, ...]] = {}
    engines: tuple[tuple[int, ...], ...] = ((),) * request.engines
    left = nodes.all()
    for name, size in blocks:
        free = nodes.all() if request.colocated else left
        if name == ENGINES:
            engines = _place_engines(request, nodes, free, ranks)
        else:
            ranks[name] = _place_ranks(name, request.groups[name], size, free)
    lent = _place_lent(request, nodes, ranks) if request.lent else ()
    return Placement(nodes.bundles, {name: ranks[name] for name in request.groups}, (*engines, *lent))


class _Nodes:
    """The bundles by node, fullest node first; within a node by GPU."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self.bundles = tuple(bundles)
        self.have_gpus = any(bundle.gpu is not None for bundle in bundles)
        by_node = _by_node(bundles)
        self.by_node = by_node if self.have_gpus else {"": [bundle for of_node in by_node.values() for bundle in of_node]}
        self.largest = max(map(len, self.by_node.values()), default=0)

    def all(self) -> list[list[int]]:
        """All bundles, by node; whoever takes some removes them from these lists."""
        return [list(bundles) for bundles in self.by_node.values()]

    def evenly_spaced(self, bundles: Sequence[int]) -> bool:
        """Return whether an engine that counts GPUs in steps can have these."""
        gpus = [self.bundles[bundle].gpu or 0 for bundle in bundles]
        return not self.have_gpus or len({b - a for a, b in pairwise(gpus)}) <= 1

    def check(self, request: PlacementRequest) -> None:
        """Refuse a tensor-parallel group or an engine that is larger than the largest node."""
        for name, layout in request.groups.items():
            if layout.tp > self.largest:
                raise self._refused(LayoutError, "tp", layout.tp).under(f"{name}.layout", LayoutError)
        if request.engines and request.engine_tp and not self.shares_of_engine(request):
            why = ", and engines of this kind cannot be on several nodes"
            if request.over_nodes:
                why = f", and no number of nodes can share it evenly with at most {self.largest} each"
            raise self._refused(ClusterError, "rollout.tp", request.engine_tp, why)

    def shares_of_engine(self, request: PlacementRequest) -> list[int]:
        """Numbers of GPUs that an engine can have on each of its nodes: all on one node, or equal shares, largest first."""
        size = request.engine_tp
        if size <= self.largest:
            return [size]
        return [share for share in reversed(divisors(size)) if 1 < share <= self.largest] if request.over_nodes else []

    def _refused(self, kind: type[LayoutError] | type[ClusterError], field: str, size: int, why: str = "") -> Any:
        reason = f"is more than the {self.largest} GPUs of a node{why}"
        return kind.of(field, size, reason, allowed=either(divisors(self.largest)), rule="is more than the GPUs of a node")

    def block_of(self, layout: Layout, *, experts_together: bool) -> int:
        """Ranks, one after the other, that must lie within a node."""
        within = layout.tp * layout.cp
        if within > self.largest:  # context-parallel groups then go over nodes
            return layout.tp
        together = math.lcm(within, layout.etp * layout.ep)
        fits = together <= self.largest and layout.world_size % together == 0
        return together if experts_together and fits else within


def _place_ranks(name: str, layout: Layout, size: int, free: list[list[int]]) -> tuple[int, ...]:
    """Bundles of a group in rank order, in blocks of `size`; they are removed from `free`."""
    taken: list[int] = []
    sizes = sorted({len(node) for node in free})
    for node in free:
        count = min(len(node) // size * size, layout.world_size - len(taken))
        taken += node[:count]
        del node[:count]
    if len(taken) < layout.world_size:
        field, value = ("tp", layout.tp) if size == layout.tp else ("cp", layout.cp)
        reason = (
            f"needs {size} GPUs of one node {layout.world_size // size} times (tp * cp = {layout.tp} * {layout.cp}), but the "
            f"nodes have {ranges(sizes, ' or ')} GPUs for {name}"
        )
        allowed = "a size that divides the GPUs of every node"
        raise LayoutError.of(
            field, value, reason, allowed=allowed, rule="does not fit into the nodes"
        ).under(f"{name}.layout", LayoutError)  # fmt: skip
    return tuple(taken)


def _place_engines(
    request: PlacementRequest, nodes: _Nodes, free: list[list[int]], ranks: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Bundles of every engine. Separate: in the order of nodes, removed from `free`. Colocated: near the policy's ranks."""
    shares = nodes.shares_of_engine(request)
    tried = (
        _over_nodes([_slots(node, share, nodes) for node in free], request.engine_tp // share) for share in shares
    )  # fmt: skip
    slots = next((slots for slots in tried if len(slots) >= request.engines), None)
    if slots is None:
        share, count = shares[0], request.engine_tp // shares[0]
        where = "one node" if count == 1 else f"each of {count} nodes"
        room = len(_over_nodes([_slots(node, share, nodes) for node in free], count))
        raise ClusterError.of(
            "rollout.tp",
            request.engine_tp,
            f"needs {share} neighbouring GPUs of {where} {request.engines} times, but the nodes have room for "
            f"{room} such engines",
            allowed="a size that divides the GPUs that every node has left for engines",
            rule=f"needs neighbouring GPUs of {where}",
        )
    if request.colocated and request.groups:
        first = next(iter(request.groups))
        return _nearest(slots, request.groups[first], ranks[first], range(request.engines), request.engines)
    taken = slots[: request.engines]
    used = {bundle for slot in taken for bundle in slot}
    for node in free:
        node[:] = [bundle for bundle in node if bundle not in used]
    return tuple(taken)


def _place_lent(request: PlacementRequest, nodes: _Nodes, ranks: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Bundles of the engines that GPUs of ranks are lent to, near the ranks that send to them."""
    rank_bundles, size = {bundle for bundles in ranks.values() for bundle in bundles}, request.engine_tp
    slots = [
        slot for node in nodes.all() for slot in _slots([number for number in node if number in rank_bundles], size, nodes)
    ]
    if len(slots) < request.lent:
        reason = f"of {size} neighbouring GPUs each have no room on the trainer's, where {len(slots)} fit"
        raise ClusterError.of(
            "rollout.schedule.lent_engines",
            request.lent,
            reason,
            allowed=f"at most {len(slots)}",
            rule="have no room on the trainer's",
        )
    first = next(iter(request.groups))
    numbers = range(request.engines, request.engines + request.lent)
    return _nearest(slots, request.groups[first], ranks[first], numbers, numbers.stop)


def _over_nodes(slots: Sequence[list[tuple[int, ...]]], count: int) -> list[tuple[int, ...]]:
    """Slots of one node after the other, or, with `count` > 1, joined from so many nodes each: those that have most left."""
    if count == 1:
        return [slot for of_node in slots for slot in of_node]
    left, joined = [list(of_node) for of_node in slots], list[tuple[int, ...]]()
    while True:
        fullest = sorted((node for node in range(len(left)) if left[node]), key=lambda node: -len(left[node]))[:count]
        if len(fullest) < count:
            return joined
        joined.append(tuple(bundle for node in sorted(fullest) for bundle in left[node].pop(0)))


def _slots(node: Sequence[int], size: int, nodes: _Nodes) -> list[tuple[int, ...]]:
    """Blocks of `size` neighbours on a node."""
    blocks, at = [], 0
    while at + size <= len(node):
        block = tuple(node[at : at + size])
        fits = nodes.evenly_spaced(block)
        blocks += [block] if fits else []
        at += size if fits else 1
    return blocks


def _nearest(
    slots: Sequence[tuple[int, ...]], layout: Layout, ranks: Sequence[int], numbers: range, engines: int
) -> tuple[tuple[int, ...], ...]:
    """A slot for each engine of these `numbers` among all `engines`: the one with most of the ranks that send to it, else the
    first that is left."""
    slot_of = {bundle: number for number, slot in enumerate(slots) for bundle in slot}
    ranks_of_stage = layout.world_size // layout.pp
    replicas = ranks_of_stage // layout.tp
    slots_of: list[Counter[int]] = [Counter() for _ in range(replicas)]
    for rank, bundle in enumerate(ranks):
        if bundle in slot_of:
            slots_of[rank % ranks_of_stage // layout.tp][slot_of[bundle]] += 1
    chosen: dict[int, int] = {}
    free = dict.fromkeys(range(len(slots)))
    for engine in numbers:
        sent: Counter[int] = Counter()
        for replica, share in replica_shares(engine, replicas, engines).items():
            sent.update({slot: share * count for slot, count in slots_of[replica].items() if slot in free})
        if sent:
            chosen[engine] = min(sent, key=lambda slot: (-sent[slot], slot))
            del free[chosen[engine]]
    left = iter(free)
    for engine in numbers:
        if engine not in chosen:
            chosen[engine] = next(left)
    return tuple(slots[chosen[engine]] for engine in numbers)


def machine(node: str) -> str:
    """The machine of a node (see `Placement.machines`)."""
    return node.partition("/")[0]


def _by_node(bundles: Sequence[Bundle]) -> dict[str, list[int]]:
    """Numbers of the bundles by node, fullest node first, then by the node's name; within a node by GPU."""
    bundles_by_node: dict[str, list[int]] = {}
    for number, bundle in enumerate(bundles):
        bundles_by_node.setdefault(bundle.node, []).append(number)
    for numbers in bundles_by_node.values():
        numbers.sort(key=lambda number: (bundles[number].gpu or 0, number))
    return dict(sorted(bundles_by_node.items(), key=lambda item: (-len(item[1]), _natural(item[0]))))


def _natural(name: str) -> list[str | int]:
    """A sort key by which `node 2` comes before `node 10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def ranges(numbers: Iterable[int], between: str = "-") -> str:
    """`0-3, 5` for 0, 1, 2, 3 and 5; with another word `between`, the least and the greatest."""
    ordered = sorted(set(numbers))
    if between != "-":
        return between.join(map(str, dict.fromkeys((ordered[0], ordered[-1])))) if ordered else "0"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
