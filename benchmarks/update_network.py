"""Weight updates of runs on hundreds to 10,240 GPUs, played through a simulated network in the order of their messages.

    python benchmarks/update_network.py --out benchmarks/results/update_network.json --docs docs/evidence/weight_updates.md

Played is the smallest part of each run that is like the whole (at least 256 ranks), at the rates of the run's GPUs.
`by_number_s` is what the same messages of relays take one after the other, first each pair's first one, as they
were sent before they had rounds. `relay_cpu_s` is what one training rank of the whole run needs to find its messages. --docs
writes the table into the document, between its markers.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from dataclasses import fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import load_any
from megarl.options.transports.relay_plan import Hops, RelayPlan
from megarl.planning.gpus import chosen_gpu
from megarl.planning.roles import Engines, run_shape
from megarl.planning.times import repeated_part, sending_seconds
from megarl.weights.cost import ClusterRates, placement_of
from megarl.weights.machines import Machines
from megarl.weights.placement import Placement, PlacementRequest
from megarl.weights.simulated_network import SimulatedNetwork
from megarl.weights.update_play import play_update

PLANS = Path(__file__).resolve().parent.parent / "examples/plans"
SEVENTY, V3 = "llama-3.1-70b-reinforce-plus-plus-64xh100", "deepseek-v3-grpo-2048xh100"
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "Llama 70B on 64": (SEVENTY, {}),
    "Llama 70B on 1,024": (SEVENTY, {"dp": 64, "engines": 128}),
    "DeepSeek-V3 on 512": ("deepseek-v3-grpo-512xh200", {}),
    "DeepSeek-V3 on 2,048": (V3, {}),
    "DeepSeek-V3 on 10,240": (V3, {"dp": 160, "engines": 320}),
}
"""A ready plan, and by how many replicas and engines the run differs from it."""
BEGIN, END = "<!-- network: begin -->", "<!-- network: end -->"


def engines_of(name: str, sizes: dict[str, int]) -> tuple[Engines, ClusterRates]:
    """The engines of a ready plan's run, of other sizes perhaps, and the rates of its GPUs."""
    config = load_any(PLANS / f"{name}.yaml", [])
    engines = run_shape(config).engines
    assert engines is not None
    layout = engines.trainer
    values = {field.name: getattr(layout, field.name) for field in fields(type(layout))}
    target = replace(engines.target, engines=sizes.get("engines", engines.target.engines))
    engines = replace(engines, trainer=type(layout)(**values | {"dp": sizes.get("dp", layout.dp)}), target=target)
    return engines, chosen_gpu(config.resources.gpu, None).cluster


def placed(engines: Engines, cluster: ClusterRates) -> Placement:
    """Where ranks and engines are that share GPUs."""
    request = PlacementRequest({"policy": engines.trainer}, engines.target.engines, engines.target.ranks, colocated=True)
    placement = placement_of(request, cluster)
    assert placement is not None, "ready plans fit into nodes"
    return placement


def by_number_s(engines: Engines, placement: Placement, cluster: ClusterRates) -> float:
    """Seconds of the relays' messages in the order of their numbers."""
    plan = engines.plan
    hops = Hops.of(plan, Machines.of(placement), range(plan.target.engines), plan.load_bytes)
    pairs = hops.sender * hops.world + hops.relay
    order = np.argsort(pairs, kind="stable")
    first = np.maximum.accumulate(np.where(np.diff(pairs[order], prepend=-1) != 0, np.arange(len(order)), 0))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order)) - first
    network = SimulatedNetwork({f"InfiniBand {way}": 1e9 * cluster.ib_gb_per_s for way in ("out", "in")})
    hops.play(network, number * hops.world + hops.distance)
    return max(network.play())


def measured(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """One run."""
    engines, cluster = engines_of(name, sizes)
    part = repeated_part(engines)
    placement = placed(part, cluster)
    began = time.process_time()
    played = play_update(part.plan, placement, cluster, "shared_memory")
    play_cpu_s = time.process_time() - began
    machines = Machines.of(placed(engines, cluster))
    began = time.process_time()
    relays = RelayPlan(engines.plan, engines.trainer.world_size // 2, machines, engines.plan.load_bytes // 2)
    relay_cpu_s = time.process_time() - began
    return {
        "ranks": engines.trainer.world_size,
        "engines": engines.target.engines,
        "ranks_of_an_engine": engines.target.ranks,
        "played_ranks": part.trainer.world_size,
        "busiest_s": played.busiest_s,
        "played_s": played.seconds,
        "planned_s": sending_seconds(part, cluster, colocated=True)[1],
        "by_number_s": by_number_s(part, placement, cluster),
        "rounds_of_a_rank": len(list(relays.steps(range(engines.target.engines)))),
        "relay_cpu_s": relay_cpu_s,
        "play_cpu_s": play_cpu_s,
    }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The runs as Markdown."""
    lines = [
        "| run | engines | busiest link | by number | in rounds | over the busiest link | planned | CPU of a rank's relays |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        seconds = " | ".join(f"{run[key]:.3f} s" for key in ("busiest_s", "by_number_s", "played_s"))
        over = f"{run['played_s'] / run['busiest_s']:.2f} times"
        engines = f"{run['engines']:,} of {run['ranks_of_an_engine']}"
        lines.append(f"| {name} | {engines} | {seconds} | {over} | {run['planned_s']:.3f} s | {run['relay_cpu_s']:.2f} s |")
    return "\n".join(lines)


def main() -> None:
    """Play all cases, or those of --cases, and write the JSON."""
    from measured_code import code_of
    from workload import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--docs", type=Path, help="document that gets the table")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="runs (default: all)")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "code": code_of("update_network"),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "runs": {},
    }
    for name in arguments.cases:
        report["runs"][name] = run = measured(*CASES[name])
        print(name, {key: round(value, 3) for key, value in run.items()}, flush=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.docs:
        text = arguments.docs.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        arguments.docs.write_text(f"{before}{BEGIN}\n{table(report['runs'])}\n{END}{after}")


if __name__ == "__main__":
    main()
