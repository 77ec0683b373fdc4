"""`megarl doctor`: this installation and its devices, the nodes of a cluster, and what listens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl.cli.submit import add_doctor_cluster, doctor_cluster

if TYPE_CHECKING:
    from rich.console import Console


def add_doctor(commands: Any, console: Callable[[], Console]) -> None:
    """Add the command to the subparsers `commands`."""
    doctor = commands.add_parser(
        "doctor",
        help="check the installation and devices, with a fix for each problem; list what listens",
        description="Show what is installed, the devices, and which layer spec and optimizer will be used and why, with a fix "
        "for each problem. Exits with code 1 if something that a run needs is missing.",
    )
    add_doctor_cluster(doctor)
    doctor.add_argument(
        "--ports", nargs="?", const="", metavar="RUN",
        help="list what your runs and servers on this machine, or the run in the folder RUN, listen on, and who may connect",
    )  # fmt: skip
    doctor.add_argument("--json", action="store_true", help="with --ports: as JSON")
    doctor.set_defaults(run=lambda arguments: _doctor(arguments, console()))


def _doctor(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.cluster:
        return doctor_cluster(arguments, console)
    if arguments.ports is not None:
        return _ports(arguments, console)
    from megarl.launch.doctor import examine, is_healthy, render

    findings = examine()
    console.print(render(findings))
    return 0 if is_healthy(findings) else 1


def _ports(arguments: argparse.Namespace, console: Console) -> int:
    from megarl.launch.ports import as_json, listening, render

    found = listening(arguments.ports or None)
    if arguments.json:
        print(json.dumps(as_json(found), indent=2))
    elif found:
        console.print(render(found))
    else:
        print("nothing listens: no run and no server of yours is on this machine")
    return 0
