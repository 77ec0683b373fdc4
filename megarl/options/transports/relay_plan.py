"""The way of weights to an engine's rank on another machine than their sender's, where engines open what ranks beside
them staged.

The sender hands them to a training rank on the engine rank's machine, its relay: the one on the same GPU, if there is one. Who
sends what to which relay follows from the plan, so that both sides know it. Pure values, without torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megarl.errors import ConfigError
from megarl.weights.machines import Machines
from megarl.weights.placement import Placement
from megarl.weights.plan import ReshardPlan, TransferBucket


class Message(NamedTuple):
    """Buckets of the plan that `sender` hands to `relay` at once, for one rank of one engine."""

    sender: int
    relay: int
    engine: int
    buckets: tuple[TransferBucket, ...]


class Step(NamedTuple):
    """What one rank does at once: a message that it sends, one that it receives, or both."""

    sent: Message | None
    received: Message | None


class RelayPlan:
    """One training rank's messages to and from relays, in an order in which no ranks wait for each other in a circle.

    All messages of all ranks have a place: the number of the message between the two, then how far the relay is from the
    sender. Every rank goes through its own by place. At one place a rank sends at most one message and receives at most one.
    """

    def __init__(self, plan: ReshardPlan, rank: int, machines: Machines, message_bytes: int) -> None:
        self._world = plan.layout.world_size
        sent, received = list[Message](), list[Message]()
        for engine, of_engine in enumerate(machines.nearest):
            for engine_rank, relay in enumerate(of_engine):
                by_sender: dict[int, list[TransferBucket]] = defaultdict(list)
                for bucket in plan.receives(engine, engine_rank):
                    if not machines.beside(bucket.rank, engine, engine_rank) and rank in (bucket.rank, relay):
                        by_sender[bucket.rank].append(bucket)
                for sender, buckets in by_sender.items():
                    messages = [Message(sender, relay, engine, some) for some in _cut(buckets, message_bytes)]
                    (sent if sender == rank else received).extend(messages)
        self._sent, self._received = self._placed(sent), self._placed(received)

    @property
    def engines(self) -> set[int]:
        """The engines that this rank hands weights of others to."""
        return {message.engine for message in self._received.values()}

    def steps(self, engines: Iterable[int]) -> Iterator[Step]:
        """What to do for an update of `engines`, in order."""
        chosen = set(engines)

        def at(messages: Mapping[tuple[int, int], Message], place: tuple[int, int]) -> Message | None:
            message = messages.get(place)
            return message if message is not None and message.engine in chosen else None

        for place in sorted(self._sent.keys() | self._received.keys()):
            step = Step(at(self._sent, place), at(self._received, place))
            if step != (None, None):
                yield step

    def _placed(self, messages: Iterable[Message]) -> dict[tuple[int, int], Message]:
        counts: dict[tuple[int, int], int] = defaultdict(int)
        placed = {}
        for message in messages:
            pair = message.sender, message.relay
            placed[counts[pair], (message.relay - message.sender) % self._world] = message
            counts[pair] += 1
        return placed


def _cut(buckets: Iterable[TransferBucket], limit_bytes: int) -> Iterator[tuple[TransferBucket, ...]]:
    """Buckets in order, as many at once as `limit_bytes` hold."""
    some: list[TransferBucket] = []
    nbytes = 0
    for bucket in buckets:
        if some and nbytes + bucket.nbytes > limit_bytes:
            yield tuple(some)
            some, nbytes = [], 0
        some.append(bucket)
        nbytes += bucket.nbytes
    if some:
        yield tuple(some)


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
