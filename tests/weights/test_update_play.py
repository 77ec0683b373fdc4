"""What plans say of an update's seconds is what its messages take in a simulated network, in their real order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import load_any
from megarl.config.layout import Layout
from megarl.models.registry import load_hf_config
from megarl.planning.gpus import chosen_gpu
from megarl.planning.roles import run_shape
from megarl.planning.times import repeated_part, sending_seconds
from megarl.weights.cost import ClusterRates, cost_of, placement_of
from megarl.weights.placement import PlacementRequest
from megarl.weights.plan import plan_reshard
from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.update_play import play_update

EXAMPLES = Path(__file__).parents[2] / "examples"
LARGE = ("deepseek", "kimi")
"""Models whose messages take a while to play."""


def _marks(name: str) -> list[pytest.MarkDecorator]:
    slow = [pytest.mark.slow] if name.startswith(LARGE) else []
    # 70B is of the same family and on as many GPUs, with a quarter of the messages
    return [*slow, pytest.mark.exhaustive] if name.startswith("llama-3.1-405b-ppo") else slow


READY = [
    pytest.param(path, marks=_marks(path.stem), id=path.stem)
    for path in sorted((EXAMPLES / "plans").glob("*.yaml"))
    if "-sft-" not in path.stem and "process_group" not in path.read_text()
]
"""Plans whose engines take turns with the trainer. Messages to engines elsewhere take long to play, of experts half an hour."""
APART = ["llama-3.1-70b-reinforce-plus-plus-64xh100", "llama-3.1-8b-ppo-32xh100"]
"""Plans that are played by the other ways of weights, too."""


def planned_and_played(path: Path, transport: str) -> tuple[float, float, float]:
    """Of a plan's smallest part that is like the whole: (seconds planned, played, of the busiest port)."""
    config = load_any(path, [])
    gpu = chosen_gpu(config.resources.gpu, None)
    engines = run_shape(config).engines
    assert engines is not None
    part, colocated = repeated_part(replace(engines, transport=transport)), transport == "shared_memory"
    request = PlacementRequest({"policy": part.trainer}, part.target.engines, part.target.ranks, colocated)
    placement = placement_of(request, gpu.cluster)
    assert placement is not None
    played = play_update(part.plan, placement, gpu.cluster, transport)
    return sending_seconds(part, gpu.cluster, colocated=colocated)[1], played.seconds, played.busiest_s


@pytest.mark.parametrize("path", READY)
def test_a_ready_plan_says_within_15_percent_what_its_messages_take(path: Path) -> None:
    planned, played, busiest = planned_and_played(path, "shared_memory")
    assert busiest <= played
    assert planned == pytest.approx(played, rel=0.15)


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        (APART[0], "rdma"),
        (APART[1], "process_group"),
        # each transport and each plan is in one of the above
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in zip(APART, ["process_group", "rdma"], strict=True)),
        pytest.param("qwen3-32b-grpo-128xh100-32k-async", "process_group", marks=pytest.mark.exhaustive),
    ],
)
def test_so_does_a_plan_whose_engines_have_gpus_of_their_own(name: str, transport: str) -> None:
    planned, played, _ = planned_and_played(EXAMPLES / "plans" / f"{name}.yaml", transport)
    assert planned == pytest.approx(played, rel=0.15)


def test_70b_on_1024_gpus_takes_at_most_a_fifth_longer_than_the_busiest_link() -> None:
    plan = plan_reshard(
        load_hf_config(EXAMPLES / "models/llama-3.1-70b"), Layout(tp=8, pp=8, dp=16), EngineTarget(tp=8, engines=128),
        bucket_bytes=2**27,
    )  # fmt: skip
    cluster = ClusterRates()
    placement = placement_of(PlacementRequest({"policy": plan.layout}, 128, 8, colocated=True), cluster)
    assert placement is not None
    played = play_update(plan, placement, cluster, "shared_memory")
    assert played.busiest_s == pytest.approx(cost_of(plan, cluster, colocated=True, placement=placement).seconds, rel=1e-6)
    assert played.busiest_s <= played.seconds <= 1.2 * played.busiest_s
