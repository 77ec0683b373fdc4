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
    from megarl.launch.rehearse import is_small_enough, planned_placement, processes, rehearse, weights_way

    config, console = with_models(config, weights=False), make_console()
    placement = planned_placement(config, gpus_per_node)
    rows, way = processes(config, placement), weights_way(config, placement)
    if not as_json:
        _print(console, placement.summary(), rows, way)
    small = steps and is_small_enough(config)
    done = rehearse(config, placement) if small else None
    if as_json:
        tree = {"placement": placement.as_json(), "processes": rows, "weights": way, "steps": vars(done) if done else None}
        console.print(json.dumps(tree, indent=1), markup=False, highlight=False, soft_wrap=True)
    elif done is not None:
        apart = done.log_prob_difference
        differ = f"trainer and engines differ by at most {apart:.1e} in log-probs; " if apart is not None else ""
        console.print(
            f"two steps by {counted(done.processes, 'rank')} on {counted(done.nodes, 'node')}: {differ}{done.folder}",
            highlight=False,
        )
        for log, addresses in done.servers.items():
            met = f", ranks met at {addresses['dist-init-addr']}" if "dist-init-addr" in addresses else ""
            console.print(f"{log} listened on {addresses['host']}:{addresses['port']}{met}", highlight=False)
    elif steps:
        console.print("no steps were made: the run has too many ranks for this machine", highlight=False)
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
