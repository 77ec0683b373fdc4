"""The names of SGLang's server arguments, read from its source: importing SGLang in the driver would cost seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megarl.errors import ConfigError, nearest


def check_engine_args(names: Iterable[str]) -> None:
    """Refuse names in `rollout.engine_args` that SGLang does not know; without SGLang here, its servers will.

    Raises:
        ConfigError: names the argument and the nearest one that there is.
    """
    for name in names:
        if name not in (known := server_arguments() or {name}):
            raise ConfigError(f"rollout.engine_args.{name} is no argument of SGLang's servers{nearest(name, known)}")


@cache
def server_arguments() -> frozenset[str]:
    """Every annotated field of SGLang's sections of server arguments; empty where SGLang is not installed."""
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return frozenset()
    folder = Path(package.submodule_search_locations[0], "srt")
    trees = [ast.parse(path.read_text()) for path in (folder / "server_args.py", *folder.glob("arg_groups/fields/*.py"))]
    sections = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = [node.target for section in sections for node in section.body if isinstance(node, ast.AnnAssign)]
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))
