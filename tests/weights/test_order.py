"""The order of a plan's buckets keeps links busy: it is played through on ranks that send and take one bucket at a time."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from megarl.config.layout import Layout
from megarl.models.registry import load_hf_config
from megarl.weights.plan import ReshardPlan, plan_reshard
from megarl.weights.sglang_targets import EngineTarget

MODEL = Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-70b"


def played_through(plan: ReshardPlan) -> tuple[float, float]:
    """(when the last byte arrives, bytes of the busiest rank), at a byte a second; who waits longest is served first."""
    queues = {rank: [(b.nbytes, (engine, b.engine_rank)) for b in plan.sends(rank) for engine in b.engines]
              for rank in range(plan.layout.world_size)}  # fmt: skip
    busy: Counter[object] = Counter()
    for rank, queue in queues.items():
        for nbytes, to in queue:
            busy[rank] += nbytes
            busy[to] += nbytes
    free: dict[object, float] = defaultdict(float)
    waiting = [(0.0, 0.0, rank) for rank in queues]
    at = Counter[int]()
    while waiting:
        now, since, rank = heapq.heappop(waiting)
        if at[rank] == len(queues[rank]):
            continue
        nbytes, to = queues[rank][at[rank]]
        if free[to] > now:
            heapq.heappush(waiting, (free[to], since, rank))
            continue
        at[rank] += 1
        free[to] = now + nbytes
        heapq.heappush(waiting, (free[to], free[to], rank))
    return max(free.values()), max(busy.values())


@pytest.mark.parametrize(
    ("layout", "target"),
    [
        (Layout(tp=8, pp=8, dp=2), EngineTarget(tp=8, engines=16)),
        (Layout(tp=4, pp=4, dp=4), EngineTarget(tp=8, engines=8)),
        (Layout(tp=8, pp=2, dp=2), EngineTarget(tp=4, engines=8)),
        (Layout(tp=2, pp=8, dp=4), EngineTarget(tp=8, engines=2)),
    ],
    ids=["as many of all", "smaller tp", "larger tp", "more replicas than engines"],
)
def test_the_last_byte_arrives_nearly_as_soon_as_the_busiest_link_allows(layout: Layout, target: EngineTarget) -> None:
    ended, busiest = played_through(plan_reshard(load_hf_config(MODEL), layout, target))
    assert busiest <= ended <= 1.12 * busiest
