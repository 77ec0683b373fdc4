"""`megarl rehearse`: a run before its GPUs are there; `commands.py` adds the command."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.cli.arguments import add_config, make_console, with_models
from megarl.config import AnyConfig, load_any
from megarl.errors import ConfigError, counted

SHOWN = 24
"""Processes that the table shows; --json has all."""
NAMED = 8
"""Members of a group that are named, at most; of larger groups the size is shown."""


def add_rehearse(commands: Any) -> None:
    """Add the command `rehearse` to the subparsers `commands`."""
    rehearse = commands.add_parser(
        "rehearse",
        help="show where every process of a run will be, and run two steps of it made small, without GPUs",
        description="Place CONFIG on nodes as Ray would find them and show what every process will see: its node and GPUs, its "
        "neighbours, how weights reach the engines. Runs of up to 32 ranks then make two real steps on this machine: same "
        "layouts, engines, schedule and transports, CPU processes, a small model of the same architecture.",
    )
    add_config(rehearse)
    rehearse.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (default: 8)")
    rehearse.add_argument("--placement-only", action="store_true", help="make no steps")
    rehearse.add_argument("--json", action="store_true", help="print what is found as JSON")
    rehearse.set_defaults(run=_rehearse)


def _rehearse(arguments: argparse.Namespace) -> int:
    if arguments.gpus_per_node < 1:
        raise ConfigError(f"--gpus-per-node is {arguments.gpus_per_node}; it must be a whole number above 0")
    config = load_any(arguments.config, arguments.overrides)
    return show_rehearsal(config, arguments.gpus_per_node, steps=not arguments.placement_only, as_json=arguments.json)


def show_rehearsal(config: AnyConfig, gpus_per_node: int, *, steps: bool, as_json: bool = False) -> int:
    """Rehearse a run on nodes of so many GPUs and print it; makes no steps if the run is too large, or without `steps`."""
    from megarl.launch.rehearse import MOST_PROCESSES, planned_placement, process_count, processes, rehearse, weights_way
    from megarl.launch.small_run import STEP

    config, console = with_models(config, weights=False), make_console()
    placement = planned_placement(config, gpus_per_node)
    rows, way = processes(config, placement), weights_way(config, placement)
    if not as_json:
        _print(console, placement.summary(), rows, way)
    small = steps and process_count(config) <= MOST_PROCESSES
    done = rehearse(config, placement) if small else None
    if as_json:
        tree = {"placement": placement.as_json(), "processes": rows, "weights": way, "steps": vars(done) if done else None}
        console.print(json.dumps(tree, indent=1), markup=False, highlight=False, soft_wrap=True)
    elif done is not None:
        apart = done.log_prob_difference
        differ = f"trainer and engines differ by at most {apart:.1e} in log-probs; " if apart is not None else ""
        where = f"{counted(done.processes, 'rank')} on {counted(done.nodes, 'node')}"
        console.print(
            f"two steps by {where}, with a learning rate of {STEP:g} of the rehearsal's own, so that an update that an engine "
            f"missed is seen (its KL is large): {differ}{done.folder}",
            highlight=False,
            soft_wrap=True,
        )
        for log, addresses in done.servers.items():
            met = f", ranks met at {addresses['dist-init-addr']}" if "dist-init-addr" in addresses else ""
            console.print(f"{log} listened on {addresses['host']}:{addresses['port']}{met}", highlight=False)
    elif steps:
        console.print(
            f"no steps were made: the run has {process_count(config)} ranks of roles and engines, and a rehearsal starts at "
            f"most {MOST_PROCESSES}; rehearse a part of it by smaller layouts, such as policy.layout.dp=1 rollout.engines=1",
            highlight=False,
            soft_wrap=True,
        )
    return 0


def _print(console: Console, summary: str, found: list[dict[str, Any]], way: dict[str, Any]) -> None:
    from megarl.weights.placement import ranges

    def members(ranks: list[int]) -> str:
        return ranges(ranks) if len(ranks) <= NAMED else f"of {len(ranks)}"

    table = Table("process", "node", "GPUs", "neighbours", box=None, pad_edge=False)
    for row in found[:SHOWN]:
        gpus = row["gpus"] if "gpus" in row else [row["gpu"]]
        near = "; ".join(f"{name} {members(ranks)}" for name, ranks in row.get("groups", {}).items())
        if row.get("nnodes", 1) > 1:
            near = f"node {row['node_rank']} of {row['nnodes']}"
        table.add_row(row["process"], row["node"], ranges(gpus), near)
    console.print(summary, highlight=False)
    console.print()
    console.print(table, highlight=False)
    if len(found) > SHOWN:
        console.print(f"and {len(found) - SHOWN:,} more: --json shows all", highlight=False)
    if way:
        console.print()
        console.print(_weights(way), highlight=False)


def _weights(way: dict[str, Any]) -> str:
    least, most = (size / 1e9 for size in way["bytes_sent"])
    text = f"weights: {way['transport']}, {least:,.2f} to {most:,.2f} GB out of a training rank"
    if "communicators" in way:
        groups = way["communicators"]
        text += f", {groups['of_a_training_rank'][1]} communicators of at most {groups['members']} members on a training rank"
    if "bytes_by_relays" in way:
        text += f", {way['bytes_by_relays'] / 1e9:,.2f} GB by relays to engines on other nodes"
    return text
