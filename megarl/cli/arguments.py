"""The arguments, the models and the console that several commands have."""

from __future__ import annotations

import argparse
import os
from typing import Any, TypeVar

import yaml
from rich.console import Console

from megarl.config import AnyConfig
from megarl.config.yaml_tree import load_text
from megarl.errors import ConfigError
from megarl.models.from_hub import models_here
from megarl.system.safe_console import SafeConsole

Root = TypeVar("Root", bound=AnyConfig)


def add_config(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add CONFIG and its overrides."""
    nargs = "?" if is_optional else None
    parser.add_argument("config", metavar="CONFIG", nargs=nargs, help="YAML file that describes the run")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="fields to override; values are YAML")


def add_template_args(parser: argparse.ArgumentParser) -> None:
    """Add --template-args."""
    parser.add_argument(
        "--template-args", metavar="YAML", default="{}", help="options of the chat template, such as '{enable_thinking: false}'"
    )


def template_args(arguments: argparse.Namespace) -> dict[str, Any]:
    """The mapping that --template-args has.

    Raises:
        ConfigError: it is none.
        DataError: a value is of no use to a template.
    """
    from megarl.data.template_args import check_value

    try:
        args = load_text(arguments.template_args)
    except yaml.YAMLError:
        args = None
    if not isinstance(args, dict):
        raise ConfigError(
            f"--template-args is '{arguments.template_args}'; it must be a mapping such as '{{enable_thinking: false}}'"
        )
    check_value(args, "--template-args")
    return {str(name): value for name, value in args.items()}


def with_models(config: Root, *, weights: bool = True) -> Root:
    """`config` with folders of this machine for its models, which its layouts divide.

    Raises:
        ModelError, LayoutError: a model is not here, or a layout does not divide it.
    """
    from megarl.models.check_layouts import check_models

    here = models_here(config, weights=weights)
    check_models(here)
    return here


def make_console() -> Console:
    """A console that folds no tables to 80 columns where its output is a file or a pipe; COLUMNS says how wide it is."""
    console = SafeConsole()
    return console if console.is_terminal or "COLUMNS" in os.environ else SafeConsole(width=200)
