"""What a rank of a large run stages at once: full buffers, never more than one, and all that the plan has it send."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.layout import Layout
from megarl.models.registry import load_hf_config
from megarl.weights.plan import ReshardPlan, plan_reshard
from megarl.weights.rank_plan import RankPlan
from megarl.weights.sglang_targets import EngineTarget

MODELS = Path(__file__).parents[2] / "examples" / "models"
STAGED = 64 * 2**20


def held_by(plan: ReshardPlan, rank: int) -> dict[str, torch.Tensor]:
    """The shapes of what a training rank holds."""
    sent = {transfer.parameter for bucket in plan.sends(rank) for transfer in plan.contents(bucket)}
    shards = {}
    for name in sent:
        size = plan.layout.tp if plan.weight_map.rule_for(name).expert is None else plan.layout.etp
        shape = plan.weight_map.rule_for(name).shape(size, plan.padded_vocab)
        shards[name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return shards


@pytest.mark.parametrize(
    ("model", "layout", "target", "rank"),
    [
        ("llama-3.1-70b", Layout(tp=8, pp=8, dp=2), EngineTarget(tp=8, engines=4), 11),
        ("llama-3.1-70b", Layout(tp=2, pp=8, dp=2), EngineTarget(tp=8, engines=2), 3),
        ("llama-3.1-70b", Layout(tp=8, pp=4), EngineTarget(tp=2, engines=3), 30),
    ],
)
def test_a_rank_of_a_large_run_stages_full_buffers_of_all_that_the_plan_has_it_send(
    model: str, layout: Layout, target: EngineTarget, rank: int
) -> None:
    plan = plan_reshard(load_hf_config(MODELS / model), layout, target, bucket_bytes=STAGED // target.ranks)
    loads = list(RankPlan(plan, rank).loads(held_by(plan, rank), range(target.engines)))
    sizes = [sum(piece.tensor.nbytes for piece in load.pieces) for load in loads]
    assert max(sizes) <= STAGED
    assert sum(sizes) / len(sizes) > 0.75 * STAGED
    planned = sum(bucket.nbytes * len(bucket.engines) for bucket in plan.sends(rank))
    assert sum(size * len(load.engines) for size, load in zip(sizes, loads, strict=True)) == planned
    one = list(RankPlan(plan, rank).loads(held_by(plan, rank), [1]))
    assert all(load.engines == {1} for load in one)
    assert {piece.held for load in one for piece in load.pieces} == {
        piece.held for load in loads if 1 in load.engines for piece in load.pieces
    }
