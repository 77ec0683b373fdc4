"""`megarl convert add-draft`: gives a model a layer that drafts tokens."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_action(actions: Any) -> argparse.ArgumentParser:
    """Add `add-draft` to the subparsers `actions`."""
    parser: argparse.ArgumentParser = actions.add_parser(
        "add-draft", help="give a model a layer that drafts tokens", description=add_draft.__doc__
    )
    parser.add_argument(
        "source", metavar="HF", help="Hugging Face folder of a model without a layer for multi-token prediction"
    )
    parser.add_argument("target", metavar="OUT", help="folder to write; it appears when it is complete")
    parser.set_defaults(run=add_draft)
    return parser


def add_draft(arguments: argparse.Namespace) -> int:
    """Write a Hugging Face folder again with a new layer for multi-token prediction, to be trained by policy.mtp.train."""
    from megarl.models.from_hub import model_in
    from megarl.options.prediction.new_layer import add_layer

    add_layer(model_in(arguments.source, "HF"), arguments.target)
    sys.stdout.write(f"{arguments.target}: the model of {arguments.source} with a new layer for multi-token prediction\n")
    return 0
