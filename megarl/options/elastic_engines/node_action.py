"""`megarl node leave` has a node's engines leave a run before the node goes; `megarl node join` brings one from elsewhere."""

from __future__ import annotations

import argparse
import re
import socket
import sys
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, counted


def add_action(actions: Any) -> None:
    """Add `leave` and `join` to the subparsers `actions`."""
    join = actions.add_parser(
        "join",
        help="start an engine here that works for a run elsewhere, until it or the run ends",
        description="Start an engine on this machine for a run that has rollout.sites: it fetches weights and prompts from the "
        "run, by connections that go out from here, and answers. Ctrl-C or SIGTERM: what it works on goes on elsewhere, with "
        "the tokens that it has. Before anything is loaded the token, the model and megarl's version are compared.",
    )
    join.add_argument("where", metavar="RUN", help="URL at which the run listens, or the run's folder, where it is visible")
    join.add_argument("--token-file", metavar="FILE", help="file with the run's token (default: MEGARL_SITES_TOKEN, or RUN's)")
    join.add_argument("--token", metavar="TOKEN", help="the token itself, which others on this machine can then see")
    join.add_argument("--model", metavar="PATH", help="folder or Hub id of the run's model (default: the run's model.path)")
    join.add_argument("--name", metavar="NAME", help="what the run calls this site (default: this machine's name)")
    join.add_argument(
        "--patience", type=float, default=600.0, metavar="SECONDS",
        help="for which a run that cannot be reached is tried again, before it leaves (default: %(default)s)",
    )  # fmt: skip
    join.set_defaults(run=_join)
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


def _join(arguments: argparse.Namespace) -> int:
    from megarl.options.elastic_engines.sites.command import join_run
    from megarl.options.elastic_engines.sites.wire import NAME

    name = arguments.name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64].strip("-._") or "site"
    if not re.match(NAME, name):
        raise ConfigError(f"--name is {name!r}; it must be at most 64 letters, digits, dots, dashes and underscores")
    if not 0 < arguments.patience < float("inf"):
        raise ConfigError(f"--patience is {arguments.patience}; it must be a number of seconds above 0")
    join_run(*_where(arguments), arguments.model, name, arguments.patience)
    return 0


def _where(arguments: argparse.Namespace) -> tuple[str, str]:
    """The URL and the token that a site was told.

    Raises:
        ConfigError: one is missing, or cannot be read.
    """
    from megarl.observe.record_lines import object_line
    from megarl.options.elastic_engines.sites.gate import ADDRESS, FOLDER, TOKEN_VARIABLE
    from megarl.system.bearer_tokens import SHORTEST_TOKEN, read_token

    if arguments.token is not None and arguments.token_file is not None:
        raise ConfigError("--token-file is given beside --token; leave one out")
    token = arguments.token or read_token(arguments.token_file, "--token-file", TOKEN_VARIABLE, ConfigError)
    url = arguments.where
    if "://" not in url:
        path = Path(url) / FOLDER / ADDRESS
        try:
            told = object_line(path.read_bytes())
            url, token = str(told["url"]), token or str(told["token"])
        except (OSError, ValueError, KeyError, TypeError):
            why = "which a run has whose config has rollout.sites, once it has started"
            raise ConfigError(f"RUN is '{url}', which has no {FOLDER}/{ADDRESS} that can be read, {why}") from None
    if token is None:
        raise ConfigError(f"the run's token is missing: set --token-file or {TOKEN_VARIABLE}")
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(f"the token must be at least {SHORTEST_TOKEN} printable ASCII characters")
    return url, token
