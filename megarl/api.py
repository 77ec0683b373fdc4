"""The calls that a Python program begins with: `open` a session of a config's models and engines, or `train` a whole run."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import AnyConfig, parse_any, parse_config
from megarl.config.section import Section
from megarl.config.yaml_tree import apply_overrides, read_yaml
from megarl.errors import ConfigError
from megarl.models.check_layouts import check_models
from megarl.models.from_hub import models_here
from megarl.system.ray_token import MODE, want_a_token
from megarl.system.user_code import give

if TYPE_CHECKING:
    from megarl.core.session import Session

AnyTree = str | Path | Mapping[str, Any] | Section | None
"""A config: a YAML file, a tree as such a file holds, or one that was read before."""
Reward = Callable[..., Any]
"""A reward function as docs/add_a_reward.md has them: `f(sample)` gives a number, `f(samples)` a list of them."""
NO_ROWS = {"source": "python", "name": "megarl.api:no_rows"}
"""The `data.train` of a session whose prompts all come from the program."""


def open(config: AnyTree = None, *, rewards: Iterable[Reward] = (), overrides: Iterable[str] = (), **sections: Any) -> Session:
    """Start the engines and models of a config for a loop of one's own (docs/python.md); leave it by `with` or `close`.

    Args:
        config: its sections `data` and `rewards` may be left out.
        rewards: functions that judge samples, besides the config's rewards.
        overrides: fields as on the command line, such as `"policy.layout.tp=2"`.
        sections: sections of the config by name, such as `model={"path": ...}`; they go before what `config` says.

    Raises:
        MegarlError: anything the user can mend, as the command line says it.
    """
    tree = _tree(config, rewards, overrides, sections)
    has_rows = "data" in tree and "train" in (tree["data"] or {})
    if not has_rows:
        tree["data"] = {**(tree.get("data") or {}), "train": NO_ROWS}
    checked = models_here(parse_config(tree, is_judged=False))
    check_models(checked)
    _close_ray(checked)
    from megarl.core.session import Session
    from megarl.trainers.inputs import read_inputs
    from megarl.trainers.rl.train import start_processes

    with ExitStack() as stack:
        inputs = read_inputs(checked, train=has_rows)
        stack.callback(inputs.close)
        session = Session(checked, inputs, start_processes)
        stack.callback(session.close)
        logs = tempfile.mkdtemp(prefix="megarl-logs-")
        session.at_close(partial(_remove_logs, session, logs))
        session.start(logs)
        session.at_close(inputs.close)
        stack.pop_all()
    return session


def train(
    config: AnyTree = None, *, rewards: Iterable[Reward] = (), overrides: Iterable[str] = (), **sections: Any
) -> dict[str, Any]:
    """Run a config from its first step to its last, as `megarl train` does; returns the run's `summary.json`.

    The arguments are as in `open`, but `data` is needed, and judged rows or `rewards`. A run that loses a process is not begun
    again; with `run.resume=auto` the next call continues it.

    Raises:
        MegarlError: anything the user can mend, as the command line says it.
    """
    checked = models_here(parse_any(_tree(config, rewards, overrides, sections)))
    check_models(checked)
    _close_ray(checked)
    summary: dict[str, Any] = importlib.import_module(f"megarl.trainers.{checked.trainer}.train").train(checked)
    return summary


def _close_ray(config: AnyConfig) -> None:
    """Have a Ray of this program's own ask for a token; Ray reads that when it is imported."""
    address = config.resources.ray_address
    if "ray" not in sys.modules:
        want_a_token(address)
    elif not address and not {"RAY_ADDRESS", MODE} & os.environ.keys():
        logging.getLogger(__name__).warning(
            "Ray was imported before megarl.open or megarl.train, so whoever reaches its ports may use it; import it later, "
            "or set RAY_AUTH_MODE (docs/security.md)"
        )


def _remove_logs(session: Session, folder: str) -> None:
    """Remove the logs of a session whose processes have ended, but not where it did not start or wrote stacks: errors name
    them."""
    if hasattr(session, "roles") and not os.path.exists(os.path.join(folder, "stacks")):
        shutil.rmtree(folder, ignore_errors=True)


def no_rows() -> list[dict[str, Any]]:
    """Give no rows: what `NO_ROWS` names."""
    return []


def _tree(config: AnyTree, rewards: Iterable[Reward], overrides: Iterable[str], sections: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, str | Path):
        tree = read_yaml(config)
    elif isinstance(config, Section):
        tree = config.model_dump(mode="json")
    elif config is None or isinstance(config, Mapping):
        tree = deepcopy(dict(config or {}))
    else:
        raise ConfigError(f"config is a {type(config).__name__}; it must be a YAML file, a mapping of sections, or a Config")
    tree = apply_overrides(_merged(tree, sections), overrides)
    functions = list(rewards)
    for function in functions:
        if not callable(function):
            raise ConfigError(f"rewards has a {type(function).__name__}; it must hold functions; others stand in the config")
    if functions:
        tree["rewards"] = [*(tree.get("rewards") or ()), *({"name": give(function)} for function in functions)]
    return tree


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The tree `below` with what `above` says in its place; mappings are joined key by key."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
