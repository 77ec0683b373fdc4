"""The one loader of what users write: a function or class named in the config, `package.module:name` or `path/to/file.py:name`.

Estimators, losses, rewards, rows of data, episodes, tools and environments come through here. The caller says which error the
sentence becomes, so that a data source and a reward fail in their own names.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.errors import MegarlError, nearest
from megarl.system.redaction import redacted

GIVEN = "given:"
"""How the name of a function begins that a program handed over (`give`), which no other process has."""
_given: dict[str, Callable[..., Any]] = {}
_loading = threading.RLock()
"""Held while a file is run, so that no other thread is given a module that is half made; a file may load another."""
FORMS = "'package.module:function' or 'path/to/file.py:function'"
"""How a function is named, as sentences say it."""
CLASS_FORMS = "'package.module:Class' or 'path/to/file.py:Class'"
"""How a class is named."""
Error = Callable[[str], MegarlError]
"""Makes the error of a sentence: a class of `megarl.errors`, or a function that says first which field it is about."""


def load_user_function(name: str, error: Error) -> Callable[..., Any]:
    """Import the function or class called `name`; see `load_user_object`."""
    function: Callable[..., Any] = load_user_object(name, error, "function", callable)
    return function


def give(function: Callable[..., Any]) -> str:
    """Name a function so that a config of this process may call it by that name."""
    plain = getattr(function, "__name__", type(function).__name__)
    names = [f"{GIVEN}{plain}", *(f"{GIVEN}{plain}#{number}" for number in range(2, len(_given) + 3))]
    name = next(name for name in names if _given.get(name, function) is function)
    _given[name] = function
    return name


def load_user_object(name: str, error: Error, what: str, is_wanted: Callable[[Any], bool]) -> Any:
    """Import what is called `name`: a `what` for which `is_wanted` holds.

    Modules are looked for in the working directory too, after installed ones.
    A file is run once in a process, however many of its functions are named, and again only if its text has changed.

    Raises:
        error: the name has no colon, the module cannot be imported, or it has nothing of that name that is wanted.
    """
    if name.startswith(GIVEN):
        if name not in _given:
            raise error(f"'{name}' is a function that a program handed to megarl.train or megarl.open; run that program again")
        return _given[name]
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise error(f"'{name}' names no {what}; it must be {FORMS.replace('function', what)}")
    try:
        module = _load_file(Path(where), name, error) if where.endswith(".py") else _load_module(where)
    except MegarlError:
        raise
    except (Exception, SystemExit) as cause:
        raise error(f"'{name}': {where} cannot be imported: {describe(cause)}") from cause
    loaded = getattr(module, attribute, None)
    if not is_wanted(loaded):
        names = _names_in(module, is_wanted)
        has = f"it has {', '.join(names[:10])}" if names else "it has none"
        raise error(f"'{name}': {where} has no {what} '{attribute}'{nearest(attribute, names)}; {has}")
    return loaded


def _names_in(module: ModuleType, is_wanted: Callable[[Any], bool]) -> list[str]:
    """Names of what is wanted in a module and was made there; of all that it has if it only imports such."""
    wanted = {key: value for key, value in vars(module).items() if is_wanted(value) and not key.startswith("_")}
    own = module.__name__
    made_here = [key for key, value in wanted.items() if f"{getattr(value, '__module__', own)}.".startswith(f"{own}.")]
    return sorted(made_here or wanted)


def why_not_called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str | None:
    """Why `function` cannot be called with such arguments, by its signature; None if it can, or has no signature."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # built in C, without a signature
        pass
    return None


def absolute_name(name: str) -> str:
    """`name` with the path of a file made absolute, so that processes with another working directory find it."""
    where, colon, attribute = name.rpartition(":")
    return f"{Path(where).resolve()}{colon}{attribute}" if where.endswith(".py") else name


def describe(cause: BaseException) -> str:
    """`ValueError: text (file.py line 12)`: what was raised, and the innermost line that raised it."""
    frames = traceback.extract_tb(cause.__traceback__)
    location = f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""
    text = str(cause)
    return redacted(f"{type(cause).__name__}{': ' if text else ''}{text}{location}")


def _load_module(where: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(where)


def _load_file(path: Path, name: str, error: Error) -> ModuleType:
    if not path.is_file():
        siblings = [str(file) for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise error(f"'{name}': there is no file {path}{nearest(str(path), siblings)}")
    identity = hashlib.sha256(str(path.resolve()).encode() + b"\0" + path.read_bytes()).hexdigest()
    module_name = f"megarl_user_{path.stem}_{identity[:16]}"  # the same in every process, as pickling needs
    with _loading:
        if module_name in sys.modules:
            return sys.modules[module_name]
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
