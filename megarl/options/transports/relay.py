"""Weights between training ranks: what a sender hands to the relay beside an engine's rank, over the trainer's own world.

Who hands what to whom is in `relay_plan.py`. The sender takes the checksums, so that they cover this way, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

from megarl.options.transports.relay_plan import Message, RelayPlan, Step, round_bytes
from megarl.weights.machines import Machines
from megarl.weights.merged_pushes import merge
from megarl.weights.plan import ReshardPlan, TransferBucket
from megarl.weights.pusher import Pushed, Pusher
from megarl.weights.rank_plan import RankPlan, SendBatch, SliceKey, WeightSlice
from megarl.weights.sglang_senders import checksums_of
from megarl.weights.staging import pack, packed_starts
from megarl.weights.tensors import TensorTable
from megarl.workers.planned_part import PlannedPart


def sent_dtypes(tensors: TensorTable) -> list[torch.dtype]:
    """By a tensor's number the type that it is sent in: its rule's own, or the model's."""
    of_model = {torch.bfloat16.itemsize: torch.bfloat16, torch.float32.itemsize: torch.float32}
    of_rules = [None if rule.dtype is None else getattr(torch, rule.dtype) for rule in tensors.rules]
    numbered = zip(tensors.rule.tolist(), tensors.itemsize.tolist(), strict=True)
    return [of_rules[rule] or of_model[size] for rule, size in numbered]


class _UnderWay(NamedTuple):
    """Messages on their way: torch's works, the buffers that are kept until then, and the loads that have come then."""

    works: Sequence[torch.distributed.Work]
    buffers: Sequence[Tensor]
    loads: Sequence[SendBatch]

    def arrived(self) -> Sequence[SendBatch]:
        """Wait for all; the loads."""
        for work in self.works:
            work.wait()
        return self.loads


class Relay:
    """One training rank's part. `sent` are the checksums of what it handed on in the last exchange, by engine."""

    def __init__(self, plan: RankPlan, messages: RelayPlan, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        """`dtypes` are those of the plan's tensors, by their numbers."""
        self._plan, self._messages, self._device, self._dtypes = plan, messages, device, dtypes
        self.sent: dict[int, dict[SliceKey, str]] = {}

    @property
    def engines(self) -> set[int]:
        """The engines that this rank hands weights of others to."""
        return self._messages.engines

    def exchange(self, shards: Mapping[str, Tensor], engines: Collection[int], *, verify: bool) -> Iterator[SendBatch]:
        """Send what others hand on, and give what this rank is to hand on; collective over the world.

        `shards` are this rank's Megatron parameters. A load given must be copied or read before the next is asked for: the
        messages after it are on their way meanwhile.
        """
        self.sent = {}
        torch.distributed.barrier()  # under NCCL the first communication of a world must be one of all its ranks
        under_way: _UnderWay | None = None
        for step in self._messages.steps(engines):
            begun = self._begun(step, shards, verify=verify)
            if under_way is not None:
                yield from under_way.arrived()
            under_way = begun
        if under_way is not None:
            yield from under_way.arrived()

    def _begun(self, step: Step, shards: Mapping[str, Tensor], *, verify: bool) -> _UnderWay:
        """The messages of a step on their way."""
        operations = [self._sending(message, shards, verify=verify) for message in step.sent]
        loads = []
        for message in step.received:
            buffer, load = self._expected(message)
            loads.append(load)
            operations.append(torch.distributed.P2POp(torch.distributed.irecv, buffer, message.sender))
        return _UnderWay(torch.distributed.batch_isend_irecv(operations), [one.tensor for one in operations], loads)

    def _sending(self, message: Message, shards: Mapping[str, Tensor], *, verify: bool) -> torch.distributed.P2POp:
        pieces = self._plan.pieces(message.buckets, shards)
        buffer = torch.empty(packed_starts(pieces)[-1], dtype=torch.uint8, device=self._device)
        packed = pack(pieces, buffer, hashed=verify)
        self.sent.setdefault(message.engine, {}).update(checksums_of(packed, values=verify))
        return torch.distributed.P2POp(torch.distributed.isend, buffer, message.relay)

    def _expected(self, message: Message) -> tuple[Tensor, SendBatch]:
        """The buffer in which a message is received, and the load that it is then."""
        empty = [
            WeightSlice(box, torch.empty(box.rows, box.cols, dtype=self._dtypes[number], device="meta"))
            for box, number in self._plan.contents(message.buckets)
        ]
        starts = packed_starts(empty)
        buffer = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        views = []
        for (box, like), start in zip(empty, starts[:-1], strict=True):
            views.append(WeightSlice(box, buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)))
        return buffer, SendBatch(views, frozenset([message.engine]), relayed=True)


class RelayedPart(PlannedPart):
    """A rank's share of a plan whose engines' ranks on other machines are reached by relays, on `device`."""

    def __init__(self, plan: ReshardPlan, rank: int, machines: Machines, device: torch.device) -> None:
        super().__init__(plan, rank, single_batch=False)
        self._beside = RankPlan(plan, rank, buckets=beside(plan.sends(rank), rank, machines))
        messages = RelayPlan(plan, rank, machines, round_bytes(plan))
        self._relay = Relay(self._beside, messages, device, sent_dtypes(plan.tensors))

    @property
    def engines(self) -> set[int]:
        return self._beside.engines | self._relay.engines

    def push(
        self,
        pusher: Pusher,
        shards: Mapping[str, Tensor],
        mine: Mapping[int, int | None],
        engines: Collection[int],
        version: int | None,
        *,
        verify: bool,
    ) -> dict[int, Pushed]:
        loads = chain(self._beside.loads(shards, mine), self._relay.exchange(shards, engines, verify=verify))
        pushed = pusher.push_loads(loads, mine, version, verify=verify)
        return merge([pushed, {engine: Pushed(checksums) for engine, checksums in self._relay.sent.items()}])


def beside(buckets: Iterable[TransferBucket], rank: int, machines: Machines) -> Iterator[TransferBucket]:
    """The buckets with those of their engines whose rank is on the machine of `rank`; without those that have none."""
    for bucket in buckets:
        near = tuple(engine for engine in bucket.engines if machines.beside(rank, engine, bucket.engine_rank))
        if near:
            yield replace(bucket, engines=near)
