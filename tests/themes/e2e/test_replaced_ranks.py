"""Runs whose ranks are killed: the others keep their processes, and the numbers are those of a run that was left in peace."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from megarl.config import Config
from megarl.errors import ClusterError
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train
from megarl.workers.group import WorkerGroup
from megarl.workers.roles import Roles
from megarl.workers.rollouts import Rollouts

pytestmark = [pytest.mark.needs_option("elastic"), pytest.mark.slow]
EXACT = ("policy/grad_norm", "policy/loss", "reward/mean", "mismatch/log_prob_max", "response/tokens_mean")


def curve(config: Config) -> list[list[float]]:
    """What must be equal of every step."""
    return [[row[name] for name in EXACT if name in row] for row in read_metrics(Path(config.run_folder) / "metrics.jsonl")]


def kill_behind(monkeypatch: pytest.MonkeyPatch, method: str, number: int, rank: int = 1) -> list[int]:
    """Have a rank of the policy killed when it has been asked for a method, of `Rank`, for the `number`-th time.

    Returns the list of process ids that were killed.
    """
    killed: list[int] = []
    calls = count(1)

    def patched(submit: Callable[..., Any]) -> Callable[..., Any]:
        def submit_and_kill(group: WorkerGroup, asked: Any, per_rank: Any) -> Any:
            submitted = submit(group, asked, per_rank)
            if asked.__name__.removesuffix("_stored") == method and next(calls) == number:
                _, pid = group.host_and_pid[rank]
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            return submitted

        return submit_and_kill

    for name in ("submit", "submit_stored"):
        monkeypatch.setattr(WorkerGroup, name, patched(getattr(WorkerGroup, name)))
    return killed


START_S = 25.0
"""For a rank's process on a node that has just joined."""
COLOCATED = {"placement": "colocated", "spares": 0}
SEPARATE = {"placement": "separate", "spares": 1}


@pytest.mark.parametrize(
    ("layout", "resources", "method", "number"),
    [
        pytest.param({"dp": 2}, SEPARATE, "update", 4, id="dp2, a spare"),
        pytest.param({"tp": 2}, COLOCATED, "update", 4, id="tp2", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2}, COLOCATED, "forward", 3, id="pp2, in log-probs", marks=pytest.mark.exhaustive),
        pytest.param({"dp": 2}, COLOCATED, "update_engines", 1, id="in a sync", marks=pytest.mark.exhaustive),
        pytest.param({"dp": 2}, SEPARATE, "update_engines", 2, id="a spare, in a sync", marks=pytest.mark.exhaustive),
        pytest.param({"dp": 2}, COLOCATED, "compute", 2, id="in advantages", marks=pytest.mark.exhaustive),
        pytest.param({"dp": 2}, COLOCATED, "ask", 5, id="while its state is copied", marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_in_which_a_rank_dies_is_computed_again_with_the_same_numbers(
    tiny_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, int],
    resources: dict[str, Any],
    method: str,
    number: int,
) -> None:
    settings: dict[str, Any] = {"policy.layout": layout, "run.steps": 3, "data.eval": None, "algorithm": {"mini_batches": 2}}
    whole = tiny_config(**settings, **{"run.name": "whole", "resources.placement": resources["placement"]})
    train(whole)
    killed = kill_behind(monkeypatch, method, number)
    config = tiny_config(**settings, **{"run.name": "replaced", "resources": resources})
    train(config)
    assert killed
    assert curve(config) == curve(whole)
    assert [row["recovery/replaced_ranks"] for row in read_metrics(Path(config.run_folder) / "metrics.jsonl")][-1] == 1


def flip(process: Any) -> None:
    """Change a bit of a weight on a rank."""
    weight = next(process.rank.roles["policy"].chunks[0].parameters())
    weight.data.view(torch.int32).view(-1)[3] ^= 1 << 20


@pytest.mark.parametrize(
    ("owner", "method", "number"),
    [
        pytest.param(Roles, "start_update", 2, id="behind log-probs"),
        pytest.param(Rollouts, "next_batch", 2, id="before engines generate", marks=pytest.mark.exhaustive),
        pytest.param(Roles, "finish_updates", 2, id="behind an update", marks=pytest.mark.exhaustive),
    ],
)
def test_a_weight_that_is_damaged_is_found_and_the_step_computed_again(
    tiny_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    owner: type,
    method: str,
    number: int,
) -> None:
    settings: dict[str, Any] = {"policy.layout": {"dp": 3}, "run.steps": 3, "data.eval": None, "rollout.prompts_per_step": 6}
    whole = tiny_config(**settings, **{"run.name": "whole"})
    train(whole)
    called, calls, roles = getattr(owner, method), count(1), list[Roles]()
    loaded = Roles.load

    def load(of_run: Roles, *arguments: Any, **named: Any) -> Any:
        roles.append(of_run)
        return loaded(of_run, *arguments, **named)

    def damage() -> None:
        ray.get(roles[-1].groups["policy"].actors[1].__ray_call__.remote(flip))  # type: ignore[attr-defined]

    def call_and_flip(of_run: Any, *arguments: Any, **named: Any) -> Any:
        is_it = next(calls) == number
        if is_it and method != "finish_updates":
            damage()
        answer = called(of_run, *arguments, **named)
        if is_it and method == "finish_updates":
            damage()
        return answer

    monkeypatch.setattr(Roles, "load", load)
    monkeypatch.setattr(owner, method, call_and_flip)
    config = tiny_config(**settings, **{"run.name": "damaged", "resources": {"spares": 0, "compare_replicas": 1}})
    train(config)
    assert "1 rank lost (rank 1 on " in " ".join(capsys.readouterr().out.split())
    assert curve(config) == curve(whole)


def node_of(cluster: Cluster, rank: int, roles: Roles) -> Any:
    """The node of a rank of the policy."""
    [node_id] = ray.get([roles.groups["policy"].actors[rank].__ray_call__.remote(ray_node_id)])  # type: ignore[attr-defined]
    return next(node for node in cluster.worker_nodes if node.node_id == node_id)


def ray_node_id(process: object) -> str:
    return str(ray.get_runtime_context().get_node_id())


@pytest.mark.exhaustive  # the test above loses a rank, and nodes' memory has tests of its own
@pytest.mark.parametrize(
    ("nodes", "resources"),
    [(4, {"spares": 1}), (4, {"spares": 0}), (3, {"spares": 0, "shrink": True})],
    ids=["a spare", "room elsewhere", "fewer replicas"],
)
def test_a_rank_whose_node_is_lost_goes_on_elsewhere_from_what_another_node_has_in_memory(
    tiny_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nodes: int,
    resources: dict[str, Any],
) -> None:
    """Fewer replicas are as many as before again when a node joins."""
    settings: dict[str, Any] = {
        "policy.layout": {"dp": 2}, "run.steps": 5, "data.eval": None, "rollout.threads": 1, "algorithm": {"mini_batches": 2},
    }  # fmt: skip
    whole = tiny_config(**settings, **{"run.name": "whole", "resources.placement": "separate"})
    train(whole)
    ray.shutdown()  # one that other tests share, which they begin anew
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 10**8})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, object_store_memory=10**8)
        start_update, calls, lost = Roles.start_update, iter(range(1, 1000)), []

        def start(roles: Roles, *arguments: Any, **named: Any) -> Any:
            number = next(calls)
            if number == 4:
                lost.append(node_of(cluster, 1, roles))
            started = start_update(roles, *arguments, **named)
            if number == 4:
                cluster.remove_node(lost[0], allow_graceful=False)
            if number == 8 and nodes == 3:
                cluster.add_node(num_cpus=1, object_store_memory=10**8)
                time.sleep(START_S)
            return started

        monkeypatch.setattr(Roles, "start_update", start)
        of_run = resources | {"placement": "separate", "ray_address": cluster.address}
        config = tiny_config(**settings, **{"run.name": "replaced", "resources": of_run})
        train(config)
        assert lost
        same, said = resources.get("shrink") is None, " ".join(capsys.readouterr().out.split())
        assert ("all ranks of policy have places again" in said) != same
        assert np.allclose(curve(config), curve(whole), rtol=0 if same else 1e-4, atol=0 if same else 1e-6)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.parametrize("placement", ["separate", pytest.param("colocated", marks=pytest.mark.exhaustive)])
def test_a_run_that_starts_again_goes_on_with_the_replicas_that_there_is_room_for(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], placement: str
) -> None:
    """They are as many as before when nodes are back; a first start is refused instead."""
    settings: dict[str, Any] = {"policy.layout": {"dp": 2}, "data.eval": None, "rollout.threads": 1, "run.save_every": 2}
    whole = tiny_config(**settings, **{"run.name": "whole", "run.steps": 5, "resources.placement": placement})
    train(whole)
    ray.shutdown()  # one that other tests share, which they begin anew
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 10**8})
    try:
        for _ in range(2 if placement == "separate" else 1):
            cluster.add_node(num_cpus=1, object_store_memory=10**8)
        start_update, calls = Roles.start_update, count(1)

        def start(roles: Roles, *arguments: Any, **named: Any) -> Any:
            if next(calls) == 2:
                cluster.add_node(num_cpus=1, object_store_memory=10**8)
                time.sleep(START_S)
            return start_update(roles, *arguments, **named)

        resources = {"spares": 1, "shrink": True, "placement": placement, "ray_address": cluster.address}
        deadlines = {"deadlines": {"start_s": 5.0}}
        config = tiny_config(**settings, **{"run.name": "first", "run.steps": 5, "resources": resources | deadlines})
        with pytest.raises(ClusterError, match="the layouts need"):
            train(config)
        monkeypatch.setattr(Roles, "start_update", start)
        monkeypatch.setattr("megarl.supervise.child_run._restarts", 1)
        monkeypatch.setattr("megarl.workers.cluster.FEWER_S", 3.0)
        config = tiny_config(**settings, **{"run.name": "again", "run.steps": 5, "resources": resources})
        train(config)
        said = " ".join(capsys.readouterr().out.split())
        assert "the Ray cluster has places for 1 of 2 replicas of policy; the run goes on with these" in said
        assert "all ranks of policy have places again" in said
        assert np.allclose(curve(config), curve(whole), rtol=1e-4, atol=1e-6)
    finally:
        ray.shutdown()
        cluster.shutdown()
