"""An update of all engines, played through a simulated network in the order in which its messages are really sent.

It says how long an update takes by its way. `cost.py` has the estimate that plans use, which a test holds to this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from megarl.option_list import part
from megarl.weights.cost import LOAD_S, MESSAGE_S, ClusterRates
from megarl.weights.engine_group import steps_of
from megarl.weights.group_sender import SMALL_BYTES, TOGETHER_BYTES
from megarl.weights.machines import Machines
from megarl.weights.placement import Placement
from megarl.weights.plan import ReshardPlan, TransferBucket
from megarl.weights.rank_plan import batches
from megarl.weights.sglang_targets import EVERY_RANK
from megarl.weights.simulated_network import Port, SimulatedNetwork

COPY, NVLINK, INFINIBAND = "copies", "NVLink", "InfiniBand"


@dataclass(frozen=True)
class Played:
    """Seconds until the last engine has everything, and those that the busiest port needs for what it carries."""

    seconds: float
    busiest_s: float


def play_update(plan: ReshardPlan, placement: Placement, cluster: ClusterRates, transport: str) -> Played:
    """Play an update by `transport`. Beside their bytes, messages take `MESSAGE_S` and loads `LOAD_S` seconds."""
    play = _Play(plan, placement, cluster)
    if transport == "process_group":
        play.by_group()
    elif transport == "rdma":
        play.by_reads()
    else:
        play.by_shared_memory()
    return Played(max(play.network.play(), default=0.0), play.network.busiest_s())


@dataclass
class _Play:
    plan: ReshardPlan
    placement: Placement
    cluster: ClusterRates
    network: SimulatedNetwork = field(init=False)

    def __post_init__(self) -> None:
        rates = {COPY: self.cluster.copy_gb_per_s, NVLINK: self.cluster.nvlink_gb_per_s, INFINIBAND: self.cluster.ib_gb_per_s}
        both_ways = {f"{kind} {way}": 1e9 * rate for kind, rate in rates.items() for way in ("out", "in")}
        self.network = SimulatedNetwork(both_ways | {COPY: 1e9 * self.cluster.copy_gb_per_s})
        self.machines = Machines.of(self.placement)
        self.ranks = self.placement.ranks["policy"]

    def _way(self, source: int, target: int) -> tuple[Port, ...]:
        """The ports between two GPUs."""
        if source == target:
            return ((COPY, source),)
        nodes = {self.placement.bundles[gpu].node for gpu in (source, target)}
        kind = NVLINK if len(nodes) == 1 else INFINIBAND
        return ((f"{kind} out", source), (f"{kind} in", target))

    def _copies(self, rank: int, loads: Iterable[tuple[Iterable[int], list[TransferBucket]]]) -> tuple[int, ...]:
        """The loads that a rank stages for engines beside it: what its next message waits for."""
        read: list[tuple[int, ...]] = []
        staged: tuple[int, ...] = ()
        for engines, buckets in loads:
            staged = (self._staged(self.ranks[rank], sum(bucket.nbytes for bucket in buckets), (*staged, *self._free(read))),)
            read.append(tuple(self._read(self.ranks[rank], engines, buckets, staged)))
        return staged

    def _free(self, read: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The flows that have read the buffer that is filled next."""
        return read[-2] if len(read) > 1 else ()

    def _staged(self, gpu: int, nbytes: int, after: Iterable[int]) -> int:
        return self.network.flow(nbytes, [(COPY, gpu)], after)

    def _read(
        self, source: int, engines: Iterable[int], buckets: Iterable[TransferBucket], after: Iterable[int]
    ) -> Iterator[int]:
        """Each rank of the engines reads its buckets of a staged load."""
        nbytes: dict[int, int] = defaultdict(int)
        for bucket in buckets:
            every = bucket.engine_rank == EVERY_RANK
            for engine_rank in range(self.plan.target.ranks) if every else (bucket.engine_rank,):
                nbytes[engine_rank] += bucket.nbytes
        for engine in engines:
            for engine_rank, size in nbytes.items():
                ports = self._way(source, self.placement.engines[engine][engine_rank])
                yield self.network.flow(size, ports, after, LOAD_S)

    def by_shared_memory(self) -> None:
        """Ranks stage what engines on their machine open, and hand the rest to relays, round by round."""
        relays = part("transports", "relay_plan", "rollout.weight_transport = 'shared_memory' on several machines")
        near = part("transports", "relay", "rollout.weight_transport = 'shared_memory' on several machines").beside
        plan, world = self.plan, self.plan.layout.world_size
        done = {
            rank: self._copies(rank, batches(near(plan.sends(rank), rank, self.machines), plan.load_bytes))
            for rank in range(world)
        }
        hops = relays.Hops.of(plan, self.machines, range(plan.target.engines), relays.round_bytes(plan))
        rounds = hops.rounds(relays.round_bytes(plan))
        read: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        arrived: dict[int, tuple[int, ...]] = {}
        on_the_way = defaultdict[int, tuple[int, ...]](tuple)
        in_order = sorted(range(len(rounds)), key=lambda number: int(rounds[number]))
        for _, of_round in groupby(in_order, key=lambda number: int(rounds[number])):
            handed, begun, staged = [], defaultdict[int, tuple[int, ...]](tuple), defaultdict[int, tuple[int, ...]](tuple)
            for number in of_round:
                sender, relay = int(hops.sender[number]), int(hops.relay[number])
                packed = self._staged(self.ranks[sender], int(hops.nbytes[number]), done[sender])
                ports = self._way(self.ranks[sender], self.ranks[relay])
                before = {packed, *done[relay], *on_the_way[sender], *on_the_way[relay]}
                flow = self.network.flow(int(hops.nbytes[number]), ports, before, MESSAGE_S)
                handed.append((number, sender, relay, flow))
                for rank in (sender, relay):
                    begun[rank] += (flow,)
            # a rank hands on what has come while the messages of its next round are on their way
            for rank in begun:
                staged[rank] = arrived.pop(rank, ())
            for number, sender, relay, flow in handed:
                engine, buckets = int(hops.engine[number]), hops.buckets(plan, number)
                copied = self._staged(self.ranks[relay], int(hops.nbytes[number]), (flow, *self._free(read[relay])))
                read[relay].append(tuple(self._read(self.ranks[relay], [engine], buckets, [copied])))
                arrived[relay] = (*arrived.get(relay, ()), copied)
                arrived.setdefault(sender, ())
                arrived[sender] = (*arrived[sender], flow)
            on_the_way |= begun
            done |= staged

    def by_reads(self) -> None:
        """Ranks stage everything; engines' ranks read it, from wherever."""
        for rank in range(self.plan.layout.world_size):
            self._copies(rank, batches(self.plan.sends(rank), self.plan.load_bytes))

    def by_group(self) -> None:
        """Every engine's ranks take what all of its senders send, step by step."""
        plan, senders = self.plan, defaultdict[int, dict[int, list[TransferBucket]]](dict)
        for rank in range(plan.layout.world_size):
            for bucket in plan.sends(rank):
                for engine in bucket.engines:
                    senders[engine].setdefault(rank, []).append(bucket)
        for engine, of_engine in senders.items():
            in_steps: list[tuple[int, int, int, int]] = []
            for rank, buckets in of_engine.items():
                by_rank: dict[int, list[int]] = defaultdict(list)
                for bucket in buckets:
                    every = bucket.engine_rank == EVERY_RANK
                    for engine_rank in range(plan.target.ranks) if every else (bucket.engine_rank,):
                        by_rank[engine_rank] += plan.transfers.nbytes[bucket.start : bucket.stop].tolist()
                for engine_rank, of_pieces in by_rank.items():
                    sizes = list(_together(of_pieces))
                    in_steps += [(step, rank, engine_rank, size) for step, size in zip(steps_of(sizes), sizes, strict=True)]
            done: dict[tuple[str, int], tuple[int, ...]] = defaultdict(tuple)
            for _, of_step in groupby(sorted(in_steps), key=lambda entry: entry[0]):
                new: dict[tuple[str, int], tuple[int, ...]] = defaultdict(tuple)
                for _, rank, engine_rank, size in of_step:
                    ends = (("sender", rank), ("rank", engine_rank))
                    ports = self._way(self.ranks[rank], self.placement.engines[engine][engine_rank])
                    flow = self.network.flow(size, ports, {*done[ends[0]], *done[ends[1]]}, MESSAGE_S)
                    for end in ends:
                        new[end] += (flow,)
                done |= new


def _together(pieces: Iterable[int]) -> Iterator[int]:
    """The bytes of messages in which pieces of so many travel, as `group_sender` makes them."""
    small = 0
    for nbytes in pieces:
        if nbytes >= SMALL_BYTES["cuda"]:
            yield nbytes
            continue
        small += nbytes
        if small >= TOGETHER_BYTES:
            yield small
            small = 0
    if small:
        yield small
