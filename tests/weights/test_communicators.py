"""Every engine has one process group, of all that send to it; a rank that would be in too many is refused."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from megarl.config import parse_config
from megarl.config.layout import Layout
from megarl.errors import ConfigError
from megarl.models.registry import load_hf_config
from megarl.weights.communicators import MOST, Communicators, check_communicators
from megarl.weights.plan import plan_reshard
from megarl.weights.sglang_targets import EngineTarget

LLAMA = Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b"


@pytest.mark.parametrize(
    ("layout", "engines", "tp"),
    [(Layout(tp=2, pp=2, dp=2), 3, 2), (Layout(dp=8), 3, 1), (Layout(pp=4), 5, 4), (Layout(tp=2, cp=2, dp=2), 1, 1)],
)
def test_groups_are_counted_as_the_plans_sends_need_them(layout: Layout, engines: int, tp: int) -> None:
    plan = plan_reshard(load_hf_config(str(LLAMA)), layout, EngineTarget(tp=tp, engines=engines))
    senders: dict[int, set[int]] = defaultdict(set)
    for rank in range(layout.world_size):
        for bucket in plan.sends(rank):
            for engine in bucket.engines:
                senders[engine].add(rank)
    assert [plan.senders(engine) for engine in range(engines)] == [sorted(senders[engine]) for engine in range(engines)]
    of_ranks = [sum(rank in of_engine for of_engine in senders.values()) for rank in range(layout.world_size)]
    found = Communicators.of(plan)
    assert found.of_a_rank == (min(of_ranks), max(of_ranks))
    assert of_ranks[found.busiest] == max(of_ranks)
    assert found.members == max(map(len, senders.values())) + tp


def test_a_rank_in_too_many_groups_is_refused_with_what_would_make_it_fewer() -> None:
    tree = {"model": {"path": "m"}, "data": {"train": {"source": "jsonl", "path": "x"}}, "rewards": [{"name": "exact_number"}]}

    def check(engines: int, transport: str, dp: int = 1) -> None:
        rollout = {"engines": engines, "weight_transport": transport, "prompts_per_step": 4 * engines}
        layout = Layout(dp=dp)
        config = parse_config(tree | {"rollout": rollout, "policy": {"layout": {"dp": dp}}})
        check_communicators(config, plan_reshard(load_hf_config(str(LLAMA)), layout, EngineTarget(engines=engines)))

    check(MOST, "process_group")
    check(MOST + 1, "shared_memory")
    check(2 * MOST, "process_group", dp=4)
    refused = (
        f"rollout.weight_transport is 'process_group', which would make rank 0 of the policy a member of {MOST + 1} process"
    )
    with pytest.raises(ConfigError, match=re.escape(refused)):
        check(MOST + 1, "process_group")
