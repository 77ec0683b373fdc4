"""`megarl doctor --cluster`: every node's facts, its clock against the first node's, and the network between them.

The nodes are those of a running Ray (RAY_ADDRESS), else of the Slurm allocation that it runs in, else this one. On each of
them one process joins a world and measures; what they found is compared here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.launch.agree import CLOCK_S, agree, differing_versions, verdicts
from megarl.launch.doctor import probe
from megarl.launch.node_facts import NodeFacts, describe_node, facts_from, read_facts, write_facts

DEADLINE_S = 300
SLOW_SHARE = 0.5
"""A node whose link makes less than this share of the median's rate is named."""


@dataclass(frozen=True)
class NodeReport:
    """One node: its facts, its clock's lead over the first node's, what it sends to the next one, and what is wrong."""

    facts: NodeFacts
    clock_s: float
    gb_per_s: float | None
    latency_s: float | None
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class ClusterReport:
    """All nodes; `problems` are about several of them. `gathered_by` says how they were reached."""

    gathered_by: str
    nodes: tuple[NodeReport, ...]
    problems: tuple[str, ...]
    interface: str | None


def examine_cluster(shared: Path) -> ClusterReport:
    """Examine all nodes; `shared` is a folder that all of them should see.

    Raises:
        ConfigError: `shared` is not shared, the nodes have no common interface.
        WorkerError: a node did not answer.
    """
    if not shared.is_dir():
        raise ConfigError(f"--shared is '{shared}', but there is no such folder; name one on the file system of run.folder")
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    with tempfile.TemporaryDirectory(prefix=".megarl-doctor-", dir=shared) as folder:
        if address := os.environ.get("RAY_ADDRESS"):
            from megarl.workers.ray_nodes import on_every_node

            gathered_by = f"the Ray at {address}"
            answers = on_every_node(address, _facts_on_node, (folder,), DEADLINE_S)
            named = _with_distinct_names([facts_from(tree) for tree in answers])
            lost = [facts.name for number, facts in enumerate(named) if not (Path(folder) / f"{number}.seen").exists()]
            if lost:
                raise ConfigError(f"{', '.join(lost)} cannot write to {shared}, or it is another there; name a shared folder")
            links = _links(named, lambda plan: on_every_node(address, _measure_on_node, (plan,), DEADLINE_S))
        elif nodes > 1 and shutil.which("srun"):
            gathered_by = f"srun in job {os.environ['SLURM_JOB_ID']}"
            _srun(nodes, "describe", folder)
            named = read_facts(folder, count=nodes)
            links = _links(named, lambda plan: _measure_by_srun(nodes, folder, plan))
        else:
            gathered_by = "this machine alone (no RAY_ADDRESS, no Slurm allocation)"
            facts = describe_node(shared)
            named, links = [facts], (None, [{"clock_s": 0.0, "gb_per_s": None, "latency_s": None}])
            write_facts(folder, facts)
    return compare(gathered_by, named, *links)


def compare(gathered_by: str, nodes: list[NodeFacts], interface: str | None, links: list[dict[str, Any]]) -> ClusterReport:
    """The verdicts over all nodes, from their facts and what each measured (`clock_s`, `gb_per_s`, `latency_s`)."""
    rates = sorted(link["gb_per_s"] for link in links if link["gb_per_s"] is not None)
    usual = rates[len(rates) // 2] if rates else None
    reports = []
    for facts, link in zip(nodes, links, strict=True):
        remarks = verdicts(facts, nodes)
        if abs(link["clock_s"]) > CLOCK_S:
            remarks.append(f"its clock is {link['clock_s']:+.1f} s off; synchronise it (chrony)")
        if usual is not None and link["gb_per_s"] is not None and link["gb_per_s"] < SLOW_SHARE * usual:
            remarks.append(f"sends {link['gb_per_s']:.2f} GB/s, where {usual:.2f} is usual")
        reports.append(NodeReport(facts, link["clock_s"], link["gb_per_s"], link["latency_s"], tuple(remarks)))
    problems = [*differing_versions(nodes), *(f"{r.facts.name}: {text}" for r in reports for text in r.remarks)]
    return ClusterReport(gathered_by, tuple(reports), tuple(problems), interface)


def _links(nodes: list[NodeFacts], measure: Any) -> tuple[str | None, list[dict[str, Any]]]:
    agreement = agree(nodes, nodes[0].name, interface=None, ports_from=os.getpid(), gpus=0)
    plan = {
        "address": agreement.addresses[nodes[0].name], "port": agreement.first_port, "interface": agreement.interface,
        "backend": "nccl" if nodes[0].gpus else "gloo",
    }  # fmt: skip
    return agreement.interface, measure(plan)


def _with_distinct_names(nodes: list[NodeFacts]) -> list[NodeFacts]:
    """Nodes of one host name (containers, namespaces) are told apart by number."""
    names = [node.name for node in nodes]
    if len(set(names)) == len(names):
        return nodes
    return [facts_from(asdict(node) | {"name": f"{node.name}-{number}"}) for number, node in enumerate(nodes)]


def _facts_on_node(number: int, count: int, folder: str) -> dict[str, Any]:
    """Under Ray: this node's facts; `<number>.seen` in the shared folder says that it could write there."""
    shared = Path(folder)
    if shared.is_dir():
        (shared / f"{number}.seen").touch()
    return asdict(describe_node(shared if shared.is_dir() else "/tmp"))


def _measure_on_node(number: int, count: int, plan: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own, because torch.distributed is told its interface by the environment, before it starts."""
    measurement = probe(
        "import json, sys; from megarl.launch.network import measure\n"
        "print('PROBE' + json.dumps(measure(json.loads(sys.argv[1]))))",
        json.dumps(plan | {"rank": number, "world_size": count}),
    )
    if "error" in measurement:
        raise ConfigError(f"node {number} could not measure its network: {measurement['error']}")
    return measurement


def _measure_by_srun(nodes: int, folder: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
    measured = Path(folder) / f"links-{uuid.uuid4().hex[:8]}"
    measured.mkdir()
    _srun(nodes, "measure", str(measured), "--plan", json.dumps(plan))
    return [json.loads((measured / f"{rank}.link").read_text()) for rank in range(nodes)]


def _srun(nodes: int, *words: str) -> None:
    command = [
        "srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1",
        sys.executable, "-m", "megarl", "node", *words,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"srun did not answer within {DEADLINE_S} s; look at the allocation's nodes with sinfo") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ConfigError(f"a node could not be examined: {lines[-1] if lines else done.returncode}")
