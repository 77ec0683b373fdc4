"""The way of weights to an engine's rank on another machine than their sender's, where engines open what ranks beside
them staged.

The sender hands them to a training rank on the engine rank's machine, its relay: the one on the same GPU, if there is one. Who
sends what to which relay follows from the plan, so that both sides know it. Pure values, without torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from megarl.errors import ConfigError
from megarl.weights.machines import Machines
from megarl.weights.placement import Placement
from megarl.weights.plan import ReshardPlan, TransferBucket
from megarl.weights.sglang_targets import EVERY_RANK
from megarl.weights.simulated_network import SimulatedNetwork
from megarl.weights.tensors import Ints


class Message(NamedTuple):
    """Buckets of the plan that `sender` hands to `relay` at once, for one rank of one engine."""

    sender: int
    relay: int
    engine: int
    buckets: tuple[TransferBucket, ...]


class Step(NamedTuple):
    """The messages that one rank sends and receives at once, in the order in which both sides name them."""

    sent: tuple[Message, ...]
    received: tuple[Message, ...]


def round_bytes(plan: ReshardPlan) -> int:
    """Bytes that a rank sends and receives in a round, at most: two rounds are under way at once, which are a load each way."""
    return max(plan.bucket_bytes, plan.load_bytes // 2)


class RelayPlan:
    """One training rank's messages to and from relays, in rounds in which no ranks wait for each other in a circle.

    In a round a rank sends at most `message_bytes` and receives as many, to and from any number of ranks. Every rank goes
    through its own rounds by number. Links are then busy nearly all the time (`tests/options/transports/test_relays.py`).
    """

    def __init__(self, plan: ReshardPlan, rank: int, machines: Machines, message_bytes: int) -> None:
        hops = Hops.of(plan, machines, _linked(plan, machines, rank), message_bytes)
        rounds = hops.rounds(message_bytes)
        self._steps: dict[int, Step] = {}
        own = np.flatnonzero((hops.sender == rank) | (hops.relay == rank))
        for number in own[np.argsort(rounds[own], kind="stable")].tolist():
            sender, relay = int(hops.sender[number]), int(hops.relay[number])
            message = Message(sender, relay, int(hops.engine[number]), hops.buckets(plan, number))
            sent, received = self._steps.get(int(rounds[number]), Step((), ()))
            step = Step((*sent, message), received) if sender == rank else Step(sent, (*received, message))
            self._steps[int(rounds[number])] = step

    @property
    def engines(self) -> set[int]:
        """The engines that this rank hands weights of others to."""
        return {message.engine for step in self._steps.values() for message in step.received}

    def steps(self, engines: Iterable[int]) -> Iterator[Step]:
        """What to do for an update of `engines`, in order."""
        chosen = set(engines)
        for step in self._steps.values():
            some = Step(*(tuple(message for message in side if message.engine in chosen) for side in step))
            if some != ((), ()):
                yield some


class Hops(NamedTuple):
    """All messages to relays of some engines, as columns; `starts` says where in `bucket` the buckets of each begin."""

    sender: Ints
    relay: Ints
    engine: Ints
    nbytes: Ints
    starts: Ints
    bucket: Ints
    world: int

    @classmethod
    def of(cls, plan: ReshardPlan, machines: Machines, engines: Iterable[int], message_bytes: int) -> Hops:
        """The messages for `engines`, each of at most `message_bytes` or one bucket."""
        every_rank = plan.bucket_engine_rank
        bucket = np.repeat(np.arange(len(every_rank)), np.where(every_rank == EVERY_RANK, plan.target.ranks, 1))
        nth = np.arange(len(bucket)) - np.searchsorted(bucket, bucket)
        engine_rank = np.where(every_rank[bucket] == EVERY_RANK, nth, every_rank[bucket])
        by_rank = np.argsort(engine_rank, kind="stable")
        bucket, engine_rank = bucket[by_rank], engine_rank[by_rank]
        of_rank, parts = np.array(machines.ranks), []
        for engine in engines:
            sender = plan.sender(np.array(engine), bucket)
            far = np.flatnonzero(of_rank[sender] != np.array(machines.engines[engine])[engine_rank])
            relay = np.array(machines.nearest[engine])[engine_rank[far]]
            order = np.argsort(sender[far] * plan.layout.world_size + relay, kind="stable")
            columns = np.stack([sender[far], relay, np.full(len(far), engine), engine_rank[far], bucket[far]])
            parts.append(columns[:, order])
        rows = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), np.int64)
        nbytes = plan.bucket_nbytes[rows[4]]
        starts = _message_starts(rows[:4], nbytes, message_bytes)
        sums = np.add.reduceat(nbytes, starts) if len(starts) else nbytes
        sender, relay, of_engine = rows[:3, starts]
        return cls(sender, relay, of_engine, sums, np.append(starts, len(nbytes)), rows[4], plan.layout.world_size)

    @property
    def distance(self) -> Ints:
        """Distance from the sender to the relay, in ranks."""
        return (self.relay - self.sender) % self.world

    def rounds(self, most_bytes: int) -> Ints:
        """The round of each message: the largest come first, of these the nearest, each into the first round in which sender
        and relay have room for it.
        """
        rounds = np.zeros(len(self.sender), np.int64)
        most = max(most_bytes, int(self.nbytes.max(initial=0)))
        ranks, index = np.unique(np.concatenate([self.sender, self.relay]), return_inverse=True)
        ends = index.reshape(2, -1)
        room = np.full((2, len(ranks), 8), most)
        for alike in self._alike():
            sender, relay = ends[:, alike]
            size = self.nbytes[alike[0]]
            fits = np.minimum(room[0, sender], room[1, relay]) >= size
            while not fits.any(axis=1).all():
                room = np.concatenate([room, np.full_like(room, most)], axis=2)
                fits = np.minimum(room[0, sender], room[1, relay]) >= size
            rounds[alike] = at = fits.argmax(axis=1)
            room[0, sender, at] -= size
            room[1, relay, at] -= size
        return rounds

    def _alike(self) -> list[Ints]:
        """Messages of one size and distance, in the order in which they get rounds; no two are of one sender or relay."""
        size, distance = -self.nbytes, self.distance
        by_pair = np.lexsort([self.engine, distance, size, self.sender])
        nth = np.empty(len(size), np.int64)  # of those of one size between two ranks
        nth[by_pair] = _numbered(np.stack([self.sender, size, distance])[:, by_pair])
        order = np.lexsort([self.sender, nth, distance, size])
        new = np.diff(np.stack([size, distance, nth])[:, order], axis=1).any(axis=0)
        return np.split(order, np.flatnonzero(new) + 1) if len(order) else []

    def play(self, network: SimulatedNetwork, rounds: Ints, message_s: float = 0.0) -> list[int]:
        """Add all messages to a network that has ports `InfiniBand out` and `InfiniBand in` of each rank: their flows.

        A message begins `message_s` seconds after both its ranks are through with their rounds before.
        """
        flows, done = [0] * len(self.sender), defaultdict[int, tuple[int, ...]](tuple)
        order = np.argsort(rounds, kind="stable")
        for of_round in np.split(order, np.flatnonzero(np.diff(rounds[order])) + 1):
            new = defaultdict[int, tuple[int, ...]](tuple)
            for number in of_round.tolist():
                sender, relay = int(self.sender[number]), int(self.relay[number])
                ports = (("InfiniBand out", sender), ("InfiniBand in", relay))
                before = {*done[sender], *done[relay]}
                flows[number] = network.flow(int(self.nbytes[number]), ports, before, message_s)
                for rank in (sender, relay):
                    new[rank] += (flows[number],)
            done |= new
        return flows

    def buckets(self, plan: ReshardPlan, number: int) -> tuple[TransferBucket, ...]:
        """The buckets of a message."""
        of_message, sender = self.bucket[self.starts[number] : self.starts[number + 1]], int(self.sender[number])
        return tuple(plan.bucket(bucket, sender, (int(self.engine[number]),)) for bucket in of_message.tolist())


def _message_starts(of_bucket: Ints, nbytes: Ints, message_bytes: int) -> Ints:
    """The beginnings of messages: as many buckets in a row as `message_bytes` hold, of which all `of_bucket` is the same."""
    if not len(nbytes):
        return np.zeros(0, np.int64)
    at = np.flatnonzero(np.diff(of_bucket, axis=1, prepend=-1).any(axis=0))
    ends, stop, starts = np.cumsum(nbytes), np.append(at[1:], len(nbytes)), [at]
    while len(at):  # the next message of every row of buckets that has one
        at = np.maximum(at + 1, np.searchsorted(ends, ends[at] - nbytes[at] + message_bytes, side="right"))
        at, stop = at[at < stop], stop[at < stop]
        starts.append(at)
    return np.sort(np.concatenate(starts))


def _numbered(rows: Ints) -> Ints:
    """The number of each column among those in a row that are equal."""
    at = np.arange(rows.shape[1])
    first = np.concatenate([[True], np.diff(rows, axis=1).any(axis=0)]) if len(at) else np.zeros(0, np.bool_)
    return at - np.maximum.accumulate(np.where(first, at, 0))


def _linked(plan: ReshardPlan, machines: Machines, rank: int) -> list[int]:
    """The engines whose messages share a rank with messages of this one, directly or by others: no round depends on more."""
    members = [{*plan.senders(engine), *machines.nearest[engine]} for engine in range(plan.target.engines)]
    engines_of: dict[int, list[int]] = defaultdict(list)
    for engine, of_engine in enumerate(members):
        for member in of_engine:
            engines_of[member].append(engine)
    linked, met, left = set[int](), {rank}, [rank]
    while left:
        for engine in engines_of[left.pop()]:
            if engine not in linked:
                linked.add(engine)
                new = members[engine] - met
                met |= new
                left += new
    return sorted(linked)


def check_relays(plan: ReshardPlan, placement: Placement) -> None:
    """Refuse shared memory where an engine's rank has no training rank on its machine, and senders on others.

    Raises:
        ConfigError: as said.
    """
    machines = Machines.of(placement)
    for engine, relays in enumerate(machines.nearest):
        for engine_rank, relay in enumerate(relays):
            if relay >= 0:
                continue
            sender = next(bucket.rank for bucket in plan.receives(engine, engine_rank))
            names = sorted(placement.machines)  # by number
            machine, other = names[machines.engines[engine][engine_rank]], names[machines.ranks[sender]]
            reason = (
                f"cannot take weights from rank {sender} of the policy on {other} to engine {engine} on {machine}, where the "
                "policy has no rank"
            )
            raise ConfigError.of("rollout.weight_transport", "shared_memory", reason, allowed="'process_group' or 'rdma'")


def relayed_bytes(plan: ReshardPlan, placement: Placement) -> int:
    """Bytes of an update that go by relays."""
    machines = Machines.of(placement)
    return sum(
        bucket.nbytes
        for engine in range(plan.target.engines)
        for engine_rank in range(plan.target.ranks)
        for bucket in plan.receives(engine, engine_rank)
        if not machines.beside(bucket.rank, engine, engine_rank)
    )
