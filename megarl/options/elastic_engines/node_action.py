"""`megarl node leave`: has a node's engines leave a run before the node goes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megarl.errors import counted


def add_action(actions: Any) -> None:
    """Add `leave` to the subparsers `actions`."""
    leave = actions.add_parser(
        "leave",
        help="have a node's engines leave a run, which goes on elsewhere with what they have sampled",
        description="Ask the run in RUN, whose rollout.engines has min and max, to go on without NODE, and wait until no "
        "engine is left there: then the node may go. None comes to that node any more.",
    )
    leave.add_argument("run_folder", metavar="RUN", help="the run's folder")
    leave.add_argument("node", metavar="NODE", help="the node's name, as engines.json in that folder has it, or its id in Ray")
    leave.add_argument("--wait", type=float, default=180.0, metavar="SECONDS", help="time for that (default: %(default)s)")
    leave.set_defaults(run=_leave)


def _leave(arguments: argparse.Namespace) -> int:
    from megarl.options.elastic_engines.requests import ask_to_leave

    left = ask_to_leave(Path(arguments.run_folder), arguments.node, arguments.wait)
    numbers = f": {', '.join(map(str, left))}" if left else ""
    sys.stdout.write(f"{counted(len(left), 'engine')} left {arguments.node}{numbers}\n")
    return 0
