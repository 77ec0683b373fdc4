"""Runs over network namespaces whose Ray nodes say that they have GPUs: what is on other machines is reached by TCP alone.

Unlike in a rehearsal on one Ray machine, every node has an address of its own: weights for an engine's rank elsewhere go by
relays, engines listen on their node's address, and ranks of one engine meet over the network.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megarl.observe import read_metrics
from megarl.platform import REHEARSAL
from megarl.rollout.engines.sglang.server_process import started_with
from tests.themes.engine_killer import write_killer
from tests.themes.multinode.namespaces import Network
from tests.themes.multinode.ray_nodes import RayNodes, environment

ROOT = Path(__file__).parents[3]
RUN_S = 240


class Ran(NamedTuple):
    """What a run over the nodes left."""

    placement: dict[str, Any]
    metrics: list[dict[str, Any]]
    servers: dict[str, dict[str, str]]
    """By the name of its log, what each process of an engine was told at its last start."""


def run(network: Network, gpus: int, folder: Path, tree: dict[str, Any], *, steps: int = 2, reward: str = "") -> Ran:
    """Some steps of a run over the nodes, of which Hugging Face's model confirms the first step's log-probs."""
    (folder / "c.yaml").write_text(yaml.safe_dump(tree))
    script = str(Path(__file__).with_name("rehearsal.py"))
    said_gpus = {REHEARSAL: "1"}
    with RayNodes(network, folder, cpus=gpus, gpus=gpus, more=said_gpus) as nodes:
        words = [sys.executable, script, str(folder / "c.yaml"), str(folder / "small"), nodes.address, str(steps), reward]
        job = network.nodes[0].start(
            *words, env=environment(said_gpus), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
        )
        try:
            said, _ = job.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            job.kill()
            said, _ = job.communicate(timeout=30)
    assert job.returncode == 0, said[-6000:]
    made = folder / "small" / "run"
    rows = list(read_metrics(made / "metrics.jsonl"))
    assert [int(row["step"]) for row in rows] == list(range(1, steps + 1))
    # what the engines computed with are the trainer's weights of each step, which move and are sent
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows), rows
    assert all(row["policy/grad_norm"] > 0 for row in rows[:-1]), rows
    agrees_with_hugging_face(folder / "small" / "model", made / "samples.jsonl")
    servers = {log.stem: started_with(log) for log in (made / "logs").glob("engine-*.log")}
    return Ran(json.loads((made / "placement.json").read_text()), rows, servers)


def agrees_with_hugging_face(model: Path, samples: Path) -> None:
    """The engines' log-probs of the first step's tokens are those of transformers' model."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    first = [sample for line in samples.read_text().splitlines() if (sample := json.loads(line))["step"] == 1]
    assert first
    for sample in first:
        prompt, response = sample["prompt_ids"], sample["response_ids"]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
        assert (expected - torch.tensor(sample["rollout_log_probs"])).abs().max() < 1e-4


def meets_its_others(servers: dict[str, dict[str, str]], engine: int, nodes: Sequence[str]) -> None:
    """Every process of an engine listens on its own node, and all meet on the first one, at a port that nobody else has."""
    names = [f"engine-{engine}", *(f"engine-{engine}-node-{number}" for number in range(1, len(nodes)))]
    told = [servers[name] for name in names]
    assert [one["host"] for one in told] == list(nodes)
    assert [one.get("node-rank") for one in told] == (
        [str(number) for number in range(len(nodes))] if len(nodes) > 1 else [None]
    )
    assert {one.get("nnodes") for one in told} == {str(len(nodes)) if len(nodes) > 1 else None}
    met = {one.get("dist-init-addr") for one in told}
    assert len(met) == 1
    if len(nodes) > 1:
        host, port = str(met.pop()).split(":")
        assert host == nodes[0]
        assert port not in {one["port"] for one in told}
    assert all(1024 < int(one["port"]) < 65536 for one in told)


def config(model: str, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(ROOT / "examples" / "models" / model)},
        "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
        "rewards": [{"name": "exact_number"}],
    } | sections


def nodes_of(places: Sequence[dict[str, Any]]) -> list[str]:
    return [place["node"] for place in places]


def gpus_of(places: Sequence[dict[str, Any]]) -> list[int]:
    return [place["gpu"] for place in places]


@pytest.mark.slow
def test_colocated_over_two_machines_with_an_engine_over_both_whose_second_process_is_killed(
    network: Network, tmp_path: Path
) -> None:
    """Weights come by relays. The killed engine is restarted on both machines, given the weights again, and the run goes on."""
    first, second = (node.address for node in network.nodes)
    tree = config("llama-3.1-8b", policy={"layout": {"tp": 2, "pp": 2, "dp": 2}}, rollout={"engines": 1, "tp": 8})
    reward, killed = write_killer(tmp_path, tmp_path / "small" / "model")
    placement, _, servers = run(network, 4, tmp_path, tree, steps=3, reward=reward)
    assert not psutil.pid_exists(int(killed.read_text()))
    ranks, [engine] = placement["ranks"]["policy"], placement["engines"]
    for stage in (ranks[:4], ranks[4:]):  # two tensor-parallel pairs; the pipeline is what goes over the network
        assert len(set(nodes_of(stage))) == 1
        assert sorted(gpus_of(stage)) == [0, 1, 2, 3]
    assert nodes_of(engine) == [first] * 4 + [second] * 4
    assert gpus_of(engine) == [0, 1, 2, 3] * 2
    meets_its_others(servers, 0, [first, second])


without_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs NIXL: pip install 'megarl[rdma]'")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["process_group", pytest.param("rdma", marks=[without_nixl, pytest.mark.exhaustive])])
def test_separate_with_engines_of_two_beside_each_other(
    network: Network, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy fills one machine, two engines the other; one process group each, or RDMA."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # NIXL, unlike the others, could see that the machines are one
    rollout = {"engines": 2, "tp": 2, "weight_transport": transport}
    tree = config("llama-3.1-8b", policy={"layout": {"tp": 2, "pp": 2}}, rollout=rollout, resources={"placement": "separate"})
    placement, _, servers = run(network, 4, tmp_path, tree)
    ranks, engines = placement["ranks"]["policy"], placement["engines"]
    [trains], [serves] = set(nodes_of(ranks)), {node for places in engines for node in nodes_of(places)}
    assert {trains, serves} == {node.address for node in network.nodes}
    assert sorted(gpus_of(ranks)) == [0, 1, 2, 3]
    assert sorted(map(gpus_of, engines)) == [[0, 1], [2, 3]]
    for engine in range(2):
        meets_its_others(servers, engine, [serves])
    assert len({told["port"] for told in servers.values()}) == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_experts_over_two_of_four_machines_and_an_engine_over_the_two_others(tmp_path: Path) -> None:
    """Eight training ranks that share experts, and an engine of eight ranks with fewer KV heads than these."""
    rollout = {
        "engines": 1, "tp": 8, "weight_transport": "process_group", "engine_args": {"ep_size": 4}, "prompts_per_step": 4,
    }  # fmt: skip
    layout = {"tp": 2, "dp": 2, "pp": 2, "ep": 4, "sequence_parallel": True}
    tree = config("qwen3-235b-a22b", policy={"layout": layout}, rollout=rollout, resources={"placement": "separate"})
    with Network(4) as network:
        placement, _, servers = run(network, 4, tmp_path, tree)
        addresses = {node.address for node in network.nodes}
    ranks, [engine] = placement["ranks"]["policy"], placement["engines"]
    assert set(nodes_of(ranks)) | set(nodes_of(engine)) == addresses
    assert not set(nodes_of(ranks)) & set(nodes_of(engine))
    for stage in (ranks[:4], ranks[4:]):  # an expert-parallel group, and in it the tensor-parallel ones
        assert len(set(nodes_of(stage))) == 1
        assert sorted(gpus_of(stage)) == [0, 1, 2, 3]
    assert gpus_of(engine) == [0, 1, 2, 3] * 2
    assert all(len(set(nodes_of(half))) == 1 for half in (engine[:4], engine[4:]))
    meets_its_others(servers, 0, [engine[0]["node"], engine[4]["node"]])
