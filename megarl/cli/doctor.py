"""`megarl doctor`: this installation and its devices, the nodes of a cluster, and what listens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megarl.cli.arguments import make_console


def add_doctor(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    doctor = commands.add_parser(
        "doctor",
        help="check the installation and devices, with a fix for each problem; list what listens",
        description="Show what is installed, the devices, and which layer spec and optimizer will be used and why, with a fix "
        "for each problem. Exits with code 1 if something that a run needs is missing.",
    )
    doctor.add_argument(
        "--cluster", action="store_true",
        help="examine every node of the Ray cluster at RAY_ADDRESS, of the current Slurm allocation, or this node",
    )  # fmt: skip
    doctor.add_argument(
        "--shared", metavar="FOLDER", default=".", help="folder that all nodes share (default: the current one)"
    )
    doctor.add_argument(
        "--ports", nargs="?", const="", metavar="RUN",
        help="list what your runs and servers on this machine, or the run in the folder RUN, listen on, and who may connect",
    )  # fmt: skip
    doctor.add_argument("--json", action="store_true", help="with --ports: as JSON")
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.cluster:
        return _cluster(arguments)
    if arguments.ports is not None:
        return _ports(arguments)
    from megarl.launch.doctor import examine, is_healthy, render

    findings = examine()
    make_console().print(render(findings))
    return 0 if is_healthy(findings) else 1


def _cluster(arguments: argparse.Namespace) -> int:
    from megarl.launch.cluster_doctor import examine_cluster
    from megarl.launch.cluster_table import cluster_tables

    report = examine_cluster(Path(arguments.shared).resolve())
    for table in cluster_tables(report):
        make_console().print(table)
    return 1 if report.problems else 0


def _ports(arguments: argparse.Namespace) -> int:
    from megarl.launch.ports import as_json, listening, render

    listeners = listening(arguments.ports or None)
    if arguments.json:
        print(json.dumps(as_json(listeners), indent=2))
    elif listeners:
        make_console().print(render(listeners))
    else:
        print("nothing listens: no run and no server of yours is on this machine")
    return 0
