"""Secrets that a user put into a config or a URL: a saved config names an environment variable in the place of each.

Keys of free mappings (`rewards[].args`, `rollout.engine_args`, …) are told by their names, credentials in texts by their form
(`megarl/system/redaction.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from megarl.config.yaml_tree import tree_places
from megarl.errors import ConfigError
from megarl.system.redaction import HIDDEN, KNOWN, is_secret, redacted

OWN_PREFIX = "MEGARL_"
"""Beginning of the variables that stand for secrets whose values were in the config."""
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)\}")


def without_secrets(tree: Any, place: str = "", *, hides_all: bool = False) -> Any:
    """A copy of a plain tree with a reference `${VARIABLE}` in the place of every secret; URLs and headers keep the rest.

    The variable is the one that the value came from, else one named after `place`, the dotted name of `tree`.
    `hides_all`: every value in `tree` is a secret, as that of `auth: {user: …, pin: …}`.
    """
    if isinstance(tree, dict):
        return {
            key: without_secrets(value, f"{place}.{key}" if place else str(key), hides_all=hides_all or is_secret(key))
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [without_secrets(value, f"{place}[{number}]", hides_all=hides_all) for number, value in enumerate(tree)]
    if not hides_all:
        return redacted(tree, _References(place)) if isinstance(tree, str) else tree
    is_number = isinstance(tree, int | float) and not re.search(r"pass|pwd|key|secret", place.rpartition(".")[2].lower())
    if tree in (None, "", False, True) or is_number or _REFERENCE.search(str(tree)):
        return tree
    return _References(place)(str(tree))


class _References:
    """Names for the secrets at one place: the first is called after the place, later ones have numbers."""

    def __init__(self, place: str) -> None:
        self._place, self._names = place, {}  # type: tuple[str, dict[str, str]]

    def __call__(self, secret: str) -> str:
        if secret not in self._names:
            name = OWN_PREFIX + re.sub(r"\W+", "_", self._place).strip("_").upper()
            self._names[secret] = f"${{{name}_{len(self._names) + 1}}}" if self._names else f"${{{name}}}"
        return KNOWN.get(secret) or self._names[secret]


def references(tree: Any) -> dict[str, str]:
    """By variable the first place of a plain tree that takes it from the environment."""
    found: dict[str, str] = {}
    for place, value in tree_places(tree):
        for name in _names_in(place, value):
            found.setdefault(name, place)
    return found


def _names_in(place: str, value: Any) -> Iterator[str]:
    """The variables that stand in a text: `MEGARL_…` anywhere, others in values of secrets and in URLs."""
    if isinstance(value, str) and "${" in value:
        keys = re.split(r"[.\[\]]+", place)
        is_any = "://" in value or any(map(is_secret, keys))
        yield from (name for name in _REFERENCE.findall(value) if is_any or name.startswith(OWN_PREFIX))


def with_environment(tree: Any) -> Any:
    """A copy of a plain tree with values of the environment in the places of references; what it has as secrets is remembered.

    Raises:
        ConfigError: a variable is not set, or the tree was saved by an earlier version, which kept no reference.
    """
    if (
        path := next((path for path, value in tree_places(tree) if isinstance(value, str) and HIDDEN in value), None)
    ) is not None:
        raise ConfigError.of(path, HIDDEN, "stands for a secret: saved configs keep none", allowed="given again")
    wanted = references(tree)
    missing = [name for name in wanted if not os.environ.get(name)]
    if missing:
        places = ", ".join(wanted[name] for name in missing)
        them = f"the environment variable{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise ConfigError.needs(places, them, "set what is missing, or give the value in the config")
    for name in wanted:  # those of megarl's own are named after their places anyway
        KNOWN[os.environ[name]] = "" if name.startswith(OWN_PREFIX) else f"${{{name}}}"
    filled = _filled(tree, wanted)
    _remember(filled)
    return filled


def _filled(tree: Any, wanted: dict[str, str], place: str = "") -> Any:
    if isinstance(tree, dict):
        return {key: _filled(value, wanted, f"{place}.{key}" if place else str(key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_filled(value, wanted, f"{place}[{number}]") for number, value in enumerate(tree)]
    names = {*_names_in(place, tree)}
    if not names:
        return tree
    return _REFERENCE.sub(lambda found: os.environ[found[1]] if found[1] in names else found[0], tree)


def _remember(tree: Any) -> None:
    """Have `redacted` know the secrets of a plain tree, also those in the variables that `api_key_env` and its like name."""
    for place, value in tree_places(tree):
        key = next((key for key in reversed(re.split(r"[.\[\]]+", place)) if key and not key.isdigit()), "")
        if isinstance(value, str) and key.endswith("_env") and os.environ.get(value):
            KNOWN.setdefault(os.environ[value], f"${{{value}}}")
        elif isinstance(value, str) and is_secret(key) and value:
            KNOWN.setdefault(value, "")


def bearer(token: str | None) -> dict[str, str]:
    """The HTTP header that brings `token`, which one of megarl's own servers asks of every request; empty without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}
