"""Advantage estimators and policy losses that the user names in the config, as `package.module:function` or
`path/to/file.py:function`: their functions, and what each of them, or a built-in one, needs.

What a function needs is read in a process of its own (`python -m megarl.algorithms.user_algorithms`): checking a config then
imports no torch, starts no thread, and survives whatever a file does when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megarl.algorithms.catalogue import ESTIMATORS, LOSS_NEEDS, EstimatorNeeds, LossNeeds
from megarl.errors import ConfigError, MegarlError
from megarl.system.user_code import load_user_function, why_not_called

IMPORT_DEADLINE_S = 300.0
"""For importing a user's file, torch included."""


@dataclass(frozen=True)
class _Kind:
    """The way in which functions named by the config field `field` are called: arguments by position and by name."""

    field: str
    what: str
    positional: tuple[str, ...]
    by_name: tuple[str, ...] = ()

    def call(self, needed: LossNeeds | EstimatorNeeds, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the arguments that are given by name to a function with these needs and with `arguments` in the config."""
        return (*self.by_name, *(needed.further if isinstance(needed, LossNeeds) else ()), *arguments)


_ESTIMATOR = _Kind("algorithm.advantage", "an advantage estimator", ("inputs",))
_LOSS = _Kind("algorithm.policy_loss", "a policy loss", ("log_probs", "old_log_probs", "advantages"), ("response", "settings"))


def estimator_needs(name: str, arguments: tuple[str, ...] = ()) -> EstimatorNeeds:
    """The needs of the advantage estimator `name`, built-in or the user's, which is given `arguments` from the config.

    Raises:
        ConfigError: the user's function cannot be imported, or cannot be called as an estimator is.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    answer = _asked(_ESTIMATOR, name, str(Path.cwd()), arguments)
    return EstimatorNeeds(**answer | {name: tuple(answer[name]) for name in ("settings", "arguments")})


def loss_needs(name: str, arguments: tuple[str, ...] = ()) -> LossNeeds:
    """`estimator_needs` for policy losses."""
    if name in LOSS_NEEDS:
        return LOSS_NEEDS[name]
    answer = _asked(_LOSS, name, str(Path.cwd()), arguments)
    return LossNeeds(**answer | {name: tuple(answer[name]) for name in ("settings", "clip", "arguments", "choice")})


def load_estimator(name: str, arguments: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The user's advantage estimator `name`, imported into this process; raises ConfigError as `estimator_needs` does."""
    return _loaded(_ESTIMATOR, name, str(Path.cwd()), arguments)[0]


def load_policy_loss(name: str, arguments: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The user's policy loss `name`, imported into this process; raises ConfigError as `loss_needs` does."""
    return _loaded(_LOSS, name, str(Path.cwd()), arguments)[0]


@cache
def _loaded(
    kind: _Kind, name: str, folder: str, arguments: tuple[str, ...]
) -> tuple[Callable[..., Any], EstimatorNeeds | LossNeeds]:
    """The function and its needs; `folder` is the working directory, which `name` may be relative to."""

    def error(text: str) -> ConfigError:
        return ConfigError(f"{kind.field}: {text}")

    function = load_user_function(name, error)
    for_estimators: EstimatorNeeds = getattr(function, "estimator_needs", EstimatorNeeds())
    for_losses: LossNeeds = getattr(function, "loss_needs", LossNeeds())
    needed, others = (for_estimators, for_losses) if kind is _ESTIMATOR else (for_losses, for_estimators)
    alien = asdict(others).items() - asdict(type(others)()).items()
    if names := ", ".join(field for field, _ in asdict(others).items() if field in dict(alien) and not hasattr(needed, field)):
        raise error(f"'{name}' says by @needs that it needs {names}, which {kind.what} is not given")
    by_name = kind.call(needed, arguments)
    why = why_not_called(function, *kind.positional, **dict.fromkeys(by_name))
    if why is not None:
        call = ", ".join([*kind.positional, *(f"{argument}=..." for argument in by_name)])
        raise error(f"'{name}' must be callable as {kind.what} is, f({call}), but {why}")
    return function, needed


@cache
def _asked(kind: _Kind, name: str, folder: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """The fields of the needs of a user's function, read in a process of its own."""
    command = [sys.executable, "-m", __name__, kind.field, name, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or folder for path in sys.path)}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=IMPORT_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{kind.field}: '{name}' was not imported within {IMPORT_DEADLINE_S:g} s") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(
            f"{kind.field}: '{name}' ended the process that imported it, with exit code {done.returncode}; its last line was "
            f"{last!r}"
        ) from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["needs"]


def _main() -> None:
    """Import the function that argv names, and write what it needs, or what is wrong with it, to stdout as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the user's file prints must not look like an answer
    field, name, *arguments = sys.argv[1:]
    kind = next(kind for kind in (_ESTIMATOR, _LOSS) if kind.field == field)
    try:
        answer: dict[str, Any] = {"needs": asdict(_loaded(kind, name, str(Path.cwd()), tuple(arguments))[1])}
    except MegarlError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # threads that the user's file started must not keep this process


if __name__ == "__main__":
    _main()
