"""`megarl serve`: a server that clients of the Tinker protocol train and sample by; megarl/cli/commands.py adds the command."""

from __future__ import annotations

import argparse
from typing import Any

from megarl.cli.arguments import add_config, with_models
from megarl.option_list import part
from megarl.system.ray_token import want_a_token


def add_serve(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    serve = commands.add_parser(
        "serve",
        help="serve training and sampling by the Tinker protocol",
        description="Keep the model and the engines of CONFIG up, and train and sample for clients of the Tinker protocol "
        "until Ctrl-C or SIGTERM. CONFIG needs a model; its section `serve` says where to listen and who may do what.",
    )
    add_config(serve)
    serve.add_argument(
        "--new-key", metavar="NAME", help="make the key of a new tenant NAME, write its hash to the file serve.tenants, and end"
    )
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    command = part("serve", "command", "megarl serve")
    config = command.load(arguments.config, arguments.overrides)
    if arguments.new_key is not None:
        print(command.new_key(config, arguments.new_key))
        return 0
    config = with_models(config)
    if not arguments.is_watched:
        command.serve(config)
        return 0
    want_a_token(config.resources.ray_address)  # else Ray may be there already
    from megarl.supervise.restarts import run_with_restarts  # loads nothing that starts threads: it forks
    from megarl.system.terminal import outlive_readers

    outlive_readers()
    return run_with_restarts(config, command.serve)
