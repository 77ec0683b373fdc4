"""A function that the user names in the config, as `package.module:function` or `path/to/file.py:function`.

The caller says which error the sentence becomes, so that a data source and a reward fail in their own names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.errors import MegarlError, nearest


def load_user_function(name: str, error: type[MegarlError]) -> Callable[..., Any]:
    """Import the function called `name`. Modules are looked for in the working directory too, after installed ones.

    Raises:
        error: the name has no colon, the module cannot be imported, or it has no such function.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise error(f"'{name}' names no function; it may be 'package.module:function' or 'path/to/file.py:function'")
    try:
        module = _load_file(Path(where), name, error) if where.endswith(".py") else _load_module(where)
    except MegarlError:
        raise
    except (Exception, SystemExit) as cause:
        raise error(f"'{name}': {where} cannot be imported: {describe(cause)}") from cause
    function = getattr(module, attribute, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        has = f"it has {', '.join(found[:10])}" if found else "it has none"
        raise error(f"'{name}': {where} has no function '{attribute}'{nearest(attribute, found)}; {has}")
    return function


def describe(cause: BaseException) -> str:
    """`ValueError: text (file.py line 12)`: what was raised, and the innermost line that raised it."""
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""
    text = str(cause)
    return f"{type(cause).__name__}{': ' if text else ''}{text}{place}"


def _load_module(where: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(where)


def _load_file(path: Path, name: str, error: type[MegarlError]) -> ModuleType:
    if not path.is_file():
        siblings = [str(file) for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise error(f"'{name}': there is no file {path}{nearest(str(path), siblings)}")
    module_name = f"megarl_user_{path.stem}_{abs(hash(str(path.resolve())))}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise error(f"'{name}': {path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
