"""Weights for an engine on another machine go by a training rank beside it: each bucket once, and nobody waits in a circle."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Config, load_config, parse_config
from megarl.config.layout import Layout
from megarl.errors import ConfigError
from megarl.models.registry import load_hf_config
from megarl.options.transports.relay import beside
from megarl.options.transports.relay_plan import Hops, Message, RelayPlan, round_bytes
from megarl.weights.machines import Machines
from megarl.weights.placement import PlacementRequest, place, planned_bundles
from megarl.weights.plan import ReshardPlan, plan_reshard
from megarl.weights.rank_plan import RankPlan
from megarl.weights.run_plan import check_transport, plan_of_run
from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.simulated_network import SimulatedNetwork
from tests.families import build_folder

MODELS = Path(__file__).parents[3] / "examples" / "models"
PLANS = MODELS.parent / "plans"
BUCKET, MESSAGE = 2**27, 2**30


def made(model: str, layout: Layout, target: EngineTarget, gpus_per_node: int) -> tuple[ReshardPlan, Machines]:
    """A plan with small buckets, and where its ranks are on nodes of so many GPUs."""
    plan = plan_reshard(load_hf_config(str(MODELS / model)), layout, target, bucket_bytes=BUCKET)
    request = PlacementRequest({"policy": layout}, target.engines, target.ranks, colocated=True)
    return plan, Machines.of(place(request, planned_bundles(request.bundles, gpus_per_node)))


CASES: list[tuple[str, Layout, EngineTarget, int]] = [
    ("llama-3.1-8b", Layout(tp=2, pp=4), EngineTarget(tp=2, engines=4), 2),
    ("llama-3.1-8b", Layout(pp=2, dp=4), EngineTarget(tp=8, engines=1), 4),
    ("llama-3.1-8b", Layout(dp=4), EngineTarget(engines=4), 2),
    ("qwen3-235b-a22b", Layout(tp=2, pp=2, dp=4, ep=8), EngineTarget(tp=4, ep=4, engines=4), 4),
    ("qwen3-235b-a22b", Layout(dp=16, ep=16), EngineTarget(tp=8, ep=8, engines=2), 4),
]


@pytest.mark.parametrize(("model", "layout", "target", "size"), CASES)
def test_every_bucket_reaches_every_rank_of_an_engine_from_one_rank_on_its_machine(
    model: str, layout: Layout, target: EngineTarget, size: int
) -> None:
    plan, machines = made(model, layout, target, size)
    reached: Counter[tuple[int, int, int]] = Counter()
    messages: list[Counter[Message]] = [Counter(), Counter()]
    for rank in range(layout.world_size):
        near = RankPlan(plan, rank, buckets=beside(plan.sends(rank), rank, machines))
        for bucket in plan.sends(rank):
            for engine in bucket.engines:
                if machines.beside(rank, engine, bucket.engine_rank):
                    assert engine in near.engines
                    reached[engine, bucket.engine_rank, bucket.number] += 1
        for step in RelayPlan(plan, rank, machines, MESSAGE).steps(range(target.engines)):
            for counted, of_side, side in zip(messages, step, ("sender", "relay"), strict=True):
                assert sum(bucket.nbytes for message in of_side for bucket in message.buckets) <= MESSAGE
                for message in of_side:
                    assert getattr(message, side) == rank
                    counted[message] += 1
                    for bucket in message.buckets if side == "relay" else ():
                        assert machines.beside(rank, message.engine, bucket.engine_rank)
                        assert not machines.beside(message.sender, message.engine, bucket.engine_rank)
                        reached[message.engine, bucket.engine_rank, bucket.number] += 1
    assert messages[0] == messages[1]
    assert set(messages[0].values()) <= {1}
    wanted = [
        (engine, engine_rank, bucket.number)
        for engine in range(target.engines)
        for engine_rank in range(target.ranks)
        for bucket in plan.receives(engine, engine_rank)
    ]
    assert reached == Counter(wanted)


@pytest.mark.parametrize(("model", "layout", "target", "size"), CASES)
@pytest.mark.parametrize("engines", [None, [0]])
def test_ranks_that_wait_for_each_step_all_come_to_the_end(
    model: str, layout: Layout, target: EngineTarget, size: int, engines: list[int] | None
) -> None:
    """A rank goes on when all messages of its step have been met by the other sides' steps, as with blocking kernels."""
    plan, machines = made(model, layout, target, size)
    wanted = engines or list(range(target.engines))
    left = [deque(RelayPlan(plan, rank, machines, MESSAGE).steps(wanted)) for rank in range(layout.world_size)]
    moved = True
    while moved:
        moved = False
        at = {rank: steps[0] for rank, steps in enumerate(left) if steps}
        sent = {message for step in at.values() for message in step.sent}
        received = {message for step in at.values() for message in step.received}
        for rank, step in at.items():
            if received.issuperset(step.sent) and sent.issuperset(step.received):
                left[rank].popleft()
                moved = True
    assert not any(left)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("llama-3.1-70b-reinforce-plus-plus-64xh100", 1.03),
        ("deepseek-v3-grpo-512xh200", 1.15),
        ("qwen3-235b-a22b-grpo-256xh100", 1.12),
    ],
)
def test_messages_of_relays_keep_the_links_between_machines_busy(name: str, most: float) -> None:
    """Played through a network in the order in which they are sent: by number, one at a time, V3 took 9.5 times the bound."""
    config = load_config(str(PLANS / f"{name}.yaml"))
    plan, request = plan_of_run(config), PlacementRequest.of(config)
    machines = Machines.of(place(request, planned_bundles(request.bundles, 8)))
    hops = Hops.of(plan, machines, range(plan.target.engines), round_bytes(plan))
    network = SimulatedNetwork({"InfiniBand out": 50e9, "InfiniBand in": 50e9})
    flows = hops.play(network, hops.rounds(round_bytes(plan)), message_s=1e-4)
    ends = network.play()
    bound = network.busiest_s()
    assert max(np.bincount(hops.sender, hops.nbytes).max(), np.bincount(hops.relay, hops.nbytes).max()) == pytest.approx(
        bound * 50e9
    )
    assert bound <= max(ends[flow] for flow in flows) <= most * bound


@pytest.mark.parametrize(("model", "layout", "target", "size"), CASES)
def test_every_rank_goes_through_the_rounds_that_all_messages_together_have(
    model: str, layout: Layout, target: EngineTarget, size: int
) -> None:
    plan, machines = made(model, layout, target, size)
    hops = Hops.of(plan, machines, range(target.engines), MESSAGE)
    rounds = hops.rounds(MESSAGE)
    for rank in range(layout.world_size):
        wanted: dict[int, tuple[set[Message], set[Message]]] = defaultdict(lambda: (set(), set()))
        for number, of_round in enumerate(rounds.tolist()):
            message = Message(*(int(column[number]) for column in hops[:3]), hops.buckets(plan, number))
            for side, end in zip(wanted[of_round], message[:2], strict=True):
                if end == rank:
                    side.add(message)
        steps = [(set(step.sent), set(step.received)) for step in RelayPlan(plan, rank, machines, MESSAGE).steps(range(99))]
        assert steps == [wanted[number] for number in sorted(wanted) if wanted[number] != (set(), set())]


def test_the_relay_is_the_rank_on_the_same_gpu_or_one_on_the_same_machine() -> None:
    request = PlacementRequest({"policy": Layout(pp=4)}, 2, 4, colocated=True)
    placement = place(request, planned_bundles(8, 4))  # the policy has the first node alone
    machines = Machines.of(placement)
    assert machines.ranks == (0, 0, 0, 0)
    assert sorted(machines.engines) == [(0, 0, 0, 0), (1, 1, 1, 1)]
    first = machines.engines.index((0, 0, 0, 0))
    ranks = placement.ranks["policy"]
    assert [ranks[relay] for relay in machines.nearest[first]] == list(placement.engines[first])
    assert machines.nearest[1 - first] == (-1, -1, -1, -1)


def config_of(layout: dict[str, int], folder: Path, resources: dict[str, Any] | None = None, **rollout: Any) -> Config:
    tree = {
        "resources": resources or {},
        "data": {"train": {"source": "jsonl", "path": "x"}},
        "rewards": [{"name": "exact_number"}],
    }
    return parse_config(tree | {"model": {"path": str(folder)}, "policy": {"layout": layout}, "rollout": rollout})


def test_shared_memory_is_refused_where_no_training_rank_can_hand_weights_on(tmp_path: Path) -> None:
    build_folder("llama", tmp_path)

    def check(config: Config, gpus_per_node: int, nodes: list[str] | None = None) -> None:
        request = PlacementRequest.of(config)
        bundles = planned_bundles(request.bundles, gpus_per_node)
        if nodes is not None:
            bundles = [replace(bundle, node=nodes[int(bundle.node.split()[-1])]) for bundle in bundles]
        check_transport(config, place(request, bundles), "cuda")

    pipeline = config_of({"tp": 2, "pp": 2}, tmp_path, tp=2, engines=2)
    check(pipeline, 4)  # on one machine
    check(pipeline, 2)  # each stage hands on to the other's node
    apart = config_of({"tp": 2}, tmp_path, tp=2, engines=2)
    refused = r"'shared_memory', which cannot take weights from rank 0 of the policy on node 0 to engine 1 on node 1, where the"
    with pytest.raises(ConfigError, match=refused):
        check(apart, 2)
    check(apart, 2, ["10.0.0.1/ab", "10.0.0.1/cd"])  # two nodes of one Ray on a machine
    check(config_of({"tp": 2}, tmp_path, tp=2, engines=2, weight_transport="process_group"), 2)
    check(config_of({"tp": 2}, tmp_path, {"placement": "separate"}, tp=2, engines=2, weight_transport="rdma"), 2)
    check(config_of({"tp": 2}, tmp_path, engine="embedded", engines=2), 2)
