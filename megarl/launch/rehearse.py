"""A rehearsal: where every process of a run will be and what it will see, and two real steps of the run made small.

The small run (`small_run.py`) is made on a Ray that says it has the GPUs; each rank is a CPU process.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import AnyConfig
from megarl.config.engine_kinds import capabilities_of
from megarl.errors import ConfigError
from megarl.launch.small_run import small_run
from megarl.observe import read_metrics
from megarl.option_list import part
from megarl.platform import REHEARSAL
from megarl.weights.communicators import Communicators
from megarl.weights.cost import ClusterRates, cost_of
from megarl.weights.placement import Placement, PlacementRequest, place, planned_bundles
from megarl.weights.run_plan import check_transport, plan_of_run

MOST_PROCESSES = 32
"""Ranks and engines' ranks that are started, at most; of larger runs only the placement is shown."""
PARALLEL = ("tp", "cp", "pp", "dp", "ep")
LISTENING = ("host", "port", "dist-init-addr", "nnodes", "node-rank")
"""Arguments that tell a server where it listens, and where it meets the engine's other processes."""


@dataclass(frozen=True)
class Rehearsed:
    """The result of two real steps: processes, nodes, and by how much trainer's and engines' log-probs differ at most.

    `servers` has, by the name of its log, where each process of an engine listened, and where its ranks met those of others.
    A run without engines has neither.
    """

    processes: int
    nodes: int
    log_prob_difference: float | None
    folder: str
    servers: dict[str, dict[str, str]]


def planned_placement(config: AnyConfig, gpus_per_node: int) -> Placement:
    """The placement of the run on nodes of so many GPUs, all free.

    Raises:
        MegarlError: it cannot be placed, or weights could not travel.
    """
    request = PlacementRequest.of(config)
    placement = place(request, planned_bundles(request.bundles, gpus_per_node))
    if config.sampling is not None:
        check_transport(config, placement)
    return placement


def processes(config: AnyConfig, placement: Placement) -> list[dict[str, Any]]:
    """Every process of a run as it would find itself: its node and GPUs, and who its neighbours are.

    A rank sees all GPUs of its node and works on `gpu`. An engine's process has a rank on each of its `gpus`, the first of
    which SGLang is given as `base_gpu_id`; of an engine on several nodes `node_rank` is this one's number of `nnodes`.
    """
    rows: list[dict[str, Any]] = []
    for group, layout in config.layouts.items():
        at = [layout.coords(rank) for rank in range(layout.world_size)]
        for rank, bundle in enumerate(placement.ranks[group]):
            coords = at[rank]
            members = {name: _members(at, coords, name) for name in PARALLEL if getattr(layout, name) > 1}
            where = placement.bundles[bundle]
            rows.append(
                {
                    "process": f"{group} {rank}",
                    "node": where.node,
                    "gpu": where.gpu,
                    "world": layout.world_size,
                    "groups": members,
                }
            )
    for engine in range(len(placement.engines)):
        nodes = placement.engine_nodes(engine)
        for number, bundles in enumerate(nodes):
            gpus = placement.gpus(bundles)
            rows.append(
                {
                    "process": f"engine {engine}" + (f", node {number}" if len(nodes) > 1 else ""),
                    "node": placement.bundles[bundles[0]].node,
                    "gpus": list(gpus),
                    "base_gpu_id": gpus[0] if gpus else None,
                    "nnodes": len(nodes),
                    "node_rank": number,
                }
            )
    return rows


def _members(at: list[Any], mine: Any, name: str) -> list[int]:
    """The ranks that differ from `mine` in nothing but `name`."""
    fixed = ("etp", "edp", "pp") if name == "ep" else tuple(other for other in ("tp", "cp", "dp", "pp") if other != name)
    return [rank for rank, coords in enumerate(at) if all(getattr(coords, field) == getattr(mine, field) for field in fixed)]


def weights_way(config: AnyConfig, placement: Placement) -> dict[str, Any]:
    """The way of weights: bytes that each training rank sends, process groups, and what goes by relays; none without a plan."""
    if config.sampling is None or capabilities_of(config.sampling).weights != "slices":
        return {}
    rollout, plan = config.sampling, plan_of_run(config)
    cost = cost_of(plan, ClusterRates(), colocated=config.resources.placement == "colocated")
    way: dict[str, Any] = {
        "transport": rollout.weight_transport,
        "bytes_sent": list(cost.sent),
        "bytes_received": list(cost.received),
    }
    if rollout.weight_transport == "process_group":
        groups = Communicators.of(plan)
        way["communicators"] = {
            "of_a_training_rank": list(groups.of_a_rank),
            "of_an_engine_rank": 1,
            "members": groups.members,
        }
    elif rollout.weight_transport == "shared_memory" and len(placement.machines) > 1:
        relays = part("transports", "relay_plan", "rollout.weight_transport")
        way["bytes_by_relays"] = relays.relayed_bytes(plan, placement)
    return way


def process_count(config: AnyConfig) -> int:
    """Ranks of roles and engines that the run starts, at most `MOST_PROCESSES` of which this machine can be asked for."""
    request = PlacementRequest.of(config)
    ranks = sum(layout.world_size for layout in request.groups.values())
    return ranks + (request.engines + request.lent) * request.engine_tp


def rehearse(config: AnyConfig, placement: Placement) -> Rehearsed:
    """Run two steps of the run made small, in `<run folder>/rehearsal`.

    Raises:
        MegarlError: whatever ends the small run.
    """
    if config.model.architecture is not None:
        raise ConfigError("model.architecture is set, and a rehearsal makes small models of megarl's own families only")
    folder = Path(config.run_folder).resolve() / "rehearsal"
    folder.mkdir(parents=True, exist_ok=True)
    nodes = Counter(bundle.node for bundle in placement.bundles)
    os.environ[REHEARSAL] = "1"
    try:
        from megarl.workers.advertised_cluster import advertised_cluster

        with advertised_cluster(list(nodes.values())) as address:
            small = small_run(config, folder, address)
            importlib.import_module(f"megarl.trainers.{config.trainer}.train").train(small)
    finally:
        del os.environ[REHEARSAL]
    rows = read_metrics(Path(small.run_folder) / "metrics.jsonl")
    count = sum(len(ranks) for ranks in placement.ranks.values()) + sum(map(len, placement.engines))
    apart = largest_difference(rows)
    return Rehearsed(count, len(nodes), apart, str(small.run_folder), listening(Path(small.run_folder)))


def largest_difference(rows: Sequence[Mapping[str, float]]) -> float | None:
    """The largest difference of trainer and engines over the steps whose metrics `rows` are; None: no step tells.

    Responses that older weights sampled are left out: trainer and engines are meant to differ on these.
    """
    maxima = [row["mismatch/log_prob_max"] for row in rows if "mismatch/log_prob_max" in row and not row.get("staleness/max")]
    return max(maxima, default=None)


def listening(run_folder: Path) -> dict[str, dict[str, str]]:
    """The address of every process of an engine, by the name of its log; empty for engines without processes of their own."""
    from megarl.rollout.engines.sglang.server_process import started_with

    by_log = {log.stem: started_with(log) for log in (run_folder / "logs").glob("engine-*.log")}
    return {log: {name: address[name] for name in LISTENING if name in address} for log, address in sorted(by_log.items())}
