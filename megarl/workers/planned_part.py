"""The sending of one part of the policy, its weights or its adapters, by the reshard plan of that part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

import torch
from torch import Tensor

from megarl.options.transports.relay import Relay
from megarl.options.transports.relay_plan import Machines, RelayPlan
from megarl.weights.plan import ReshardPlan
from megarl.weights.pusher import Pushed, Pusher, merge
from megarl.weights.rank_plan import RankPlan, SliceKey
from megarl.weights.sglang_senders import checksums_of
from megarl.weights.staging import StagedSlices
from megarl.weights.verify import verify as verify_plan


class PlannedPart:
    """A rank's share of a plan. With `machines` what an engine's rank elsewhere is to open goes by its relay, on `device`."""

    def __init__(
        self, plan: ReshardPlan, rank: int, machines: Machines | None, device: torch.device, *, single_batch: bool
    ) -> None:
        """`single_batch`: as in `RankPlan`."""
        if rank == 0:
            verify_plan(plan)  # once is enough: all ranks make the same plan, this one first
        self._share = RankPlan(plan, rank, single_batch=single_batch)
        self._plan = RankPlan(plan, rank, single_batch=single_batch, machines=machines) if machines else self._share
        self._relay = Relay(self._plan, RelayPlan(plan, rank, machines, plan.load_bytes), device) if machines else None

    @property
    def load_bytes(self) -> int:
        """Bytes that are staged at once, at most."""
        return self._plan.load_bytes

    @property
    def engines(self) -> set[int]:
        """The engines that this rank sends something to."""
        return self._plan.engines | (self._relay.engines if self._relay is not None else set())

    def senders(self, engine: int) -> list[int]:
        """All ranks that send to an engine."""
        return self._plan.senders(engine)

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
        """Send `shards` to `engines`, of which `mine` are those that this rank sends to; see `Pusher.push_loads`."""
        loads = self._plan.loads(shards, mine)
        if self._relay is None:
            return pusher.push_loads(loads, mine, version, verify=verify)
        loads = chain(loads, self._relay.exchange(shards, engines, verify=verify))
        pushed = pusher.push_loads(loads, mine, version, verify=verify)
        return merge([pushed, {engine: Pushed(checksums) for engine, checksums in self._relay.sent.items()}])

    def checksums(self, shards: Mapping[str, Tensor], engines: Collection[int]) -> dict[int, Pushed]:
        """By engine the checksums of what this rank would send: nothing is."""
        found: dict[int, dict[SliceKey, str]] = {}
        for load in self._share.loads(shards, engines):
            of_load = checksums_of(StagedSlices(load.pieces))
            for engine in load.engines & frozenset(engines):
                found.setdefault(engine, {}).update(of_load)
        return {engine: Pushed(checksums) for engine, checksums in found.items()}
