"""Runs over network namespaces whose Ray nodes say that they have GPUs: what is on other machines is reached by TCP alone.

Unlike in a rehearsal on one Ray machine, every node has an address of its own: weights for an engine's rank elsewhere go by
relays, engines listen on their node's address, and ranks of one engine meet over the network.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.observe import read_metrics
from megarl.platform import REHEARSAL
from tests.themes.multinode.namespaces import Network

ROOT = Path(__file__).parents[3]
PORT = 6390
TOKEN = secrets.token_hex(32)
"""What this Ray wants to see, and what others on this machine do not have."""


OWN_SHARED_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
"""Machines share none: SGLang takes processes that do for processes of one machine."""


def environment() -> dict[str, str]:
    """Of every process on the nodes."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    return own | {
        REHEARSAL: "1", "GLOO_SOCKET_IFNAME": "eth0", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN,
    }  # fmt: skip


@contextmanager
def ray_over(network: Network, gpus: int, folder: Path) -> Iterator[str]:
    """The address of a Ray over all nodes, each with so many GPUs that are not there."""
    head = f"{network.nodes[0].address}:{PORT}"
    common = ["--num-cpus", str(gpus), "--num-gpus", str(gpus), "--object-store-memory", str(10**8), "--block"]
    started = []
    try:
        for number, node in enumerate(network.nodes):
            role = ["--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", f"/tmp/r{network.tag}"]
            words = ["ray", "start", f"--node-ip-address={node.address}", *common]
            words += role if number == 0 else [f"--address={head}"]
            log = (folder / f"ray-{node.name}.txt").open("w")
            started.append(node.start(*OWN_SHARED_MEMORY, *words, env=environment(), stdout=log, stderr=subprocess.STDOUT))
            time.sleep(6 if number == 0 else 0)
        time.sleep(6)
        yield head
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(timeout=30)


def run(network: Network, gpus: int, folder: Path, tree: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Two steps of a run over the nodes: its placement and its metrics."""
    (folder / "c.yaml").write_text(yaml.safe_dump(tree))
    script = str(Path(__file__).with_name("rehearsal.py"))
    with ray_over(network, gpus, folder) as address:
        words = [sys.executable, script, str(folder / "c.yaml"), str(folder / "small"), address]
        job = network.nodes[0].start(*words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            said, _ = job.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            job.kill()
            said, _ = job.communicate(timeout=30)
    assert job.returncode == 0, said[-6000:]
    made = folder / "small" / "run"
    return json.loads((made / "placement.json").read_text()), list(read_metrics(made / "metrics.jsonl"))


def config(model: str, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(ROOT / "examples" / "models" / model)},
        "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
        "rewards": [{"name": "exact_number"}],
    } | sections


def nodes_of(places: Sequence[dict[str, Any]]) -> list[str]:
    return [place["node"] for place in places]


without_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs NIXL: pip install 'megarl[rdma]'")


@pytest.mark.slow
@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("shared_memory", id="colocated"),
        pytest.param("process_group", id="separate"),
        pytest.param("rdma", marks=without_nixl),
    ],
)
def test_a_pipeline_over_two_machines_gives_its_weights_to_engines_of_both(
    network: Network, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colocated: one engine over both machines, weights by relays. Separate: two engines, a process group for each, or RDMA."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # NIXL, unlike the others, could see that the machines are one
    first, second = (node.address for node in network.nodes)
    how = "colocated" if transport == "shared_memory" else "separate"
    engines = {"engines": 1, "tp": 4} if how == "colocated" else {"engines": 2, "tp": 2}
    rollout = {**engines, "weight_transport": transport}
    tree = config("llama-3.1-8b", policy={"layout": {"tp": 2, "pp": 2}}, rollout=rollout, resources={"placement": how})
    gpus = 2 if how == "colocated" else 4
    placement, rows = run(network, gpus, tmp_path, tree)
    assert [int(row["step"]) for row in rows] == [1, 2]
    # what the engines computed with are the trainer's weights of each step, of which the second's were sent
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows), rows
    ranks = placement["ranks"]["policy"]
    assert all(len(set(nodes_of(pair))) == 1 for pair in (ranks[:2], ranks[2:]))
    if how == "colocated":
        assert sorted(nodes_of(ranks)) == [first, first, second, second]
        assert nodes_of(placement["engines"][0]) == [first, first, second, second]
        assert [place["gpu"] for place in placement["engines"][0]] == [0, 1, 0, 1]
    else:
        assert all(len(set(nodes_of(places))) == 1 for places in placement["engines"])
        used = [(place["node"], place["gpu"]) for places in (ranks, *placement["engines"]) for place in places]
        assert len(set(used)) == 8
