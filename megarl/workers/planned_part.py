"""The sending of one part of the policy, its weights or its adapters, by the reshard plan of that part."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from megarl.weights.plan import ReshardPlan
from megarl.weights.pusher import Pushed, Pusher
from megarl.weights.rank_plan import RankPlan, SliceKey
from megarl.weights.sglang_senders import checksums_of
from megarl.weights.staging import StagedSlices
from megarl.weights.verify import verify as verify_plan


class PlannedPart:
    """A rank's share of a plan."""

    def __init__(self, plan: ReshardPlan, rank: int, *, single_batch: bool) -> None:
        """`single_batch`: as in `RankPlan`."""
        if rank == 0:
            verify_plan(plan)  # once is enough: all ranks make the same plan, this one first
        self._share = RankPlan(plan, rank, single_batch=single_batch)

    @property
    def load_bytes(self) -> int:
        """Bytes that are staged at once, at most."""
        return self._share.load_bytes

    @property
    def engines(self) -> set[int]:
        """The engines that this rank sends something to."""
        return self._share.engines

    def senders(self, engine: int) -> list[int]:
        """All ranks that send to an engine."""
        return self._share.senders(engine)

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
        return pusher.push_loads(self._share.loads(shards, mine), mine, version, verify=verify)

    def checksums(self, shards: Mapping[str, Tensor], engines: Collection[int]) -> dict[int, Pushed]:
        """By engine the checksums of what this rank would send: nothing is."""
        checksums_by_engine: dict[int, dict[SliceKey, str]] = {}
        for load in self._share.loads(shards, engines):
            of_load = checksums_of(StagedSlices(load.pieces))
            for engine in load.engines & frozenset(engines):
                checksums_by_engine.setdefault(engine, {}).update(of_load)
        return {engine: Pushed(checksums) for engine, checksums in checksums_by_engine.items()}
