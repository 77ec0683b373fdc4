"""YAML and `key=value` overrides as plain trees of dictionaries.

PyYAML's safe loader with two mends: `1e-6` is a number (YAML 1.1 reads it as text), and a key given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import ConfigError, describe_value

DEEPEST, MOST_ENTRIES = 50, 200_000
"""The deepest nesting and the most entries of a config, with its aliases written out."""


class _Loader(yaml.SafeLoader):
    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge what `<<` names, as PyYAML does, unless merges of merges multiply."""
        merged = 0
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                named = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for part in (part for part in named if isinstance(part, yaml.MappingNode) and part is not node):
                    self.flatten_mapping(part)
                    merged += len(part.value)
        if merged > MOST_ENTRIES:
            raise yaml.constructor.ConstructorError(
                problem=f"what '<<' merges has more than {MOST_ENTRIES} entries", problem_mark=node.start_mark
            )
        super().flatten_mapping(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a key is a list or a mapping; it must be a name", problem_mark=key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key '{key_node.value}' is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the YAML file at `path` as a tree; ConfigError if it is missing, no YAML, or no mapping."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"config file '{path}' cannot be read: {reason}") from None
    try:
        tree = load_text(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file '{path}' is not valid YAML: {_one_line(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config file '{path}' holds {describe_value(tree)}; it must hold sections such as 'model:'")
    return tree


def load_text(text: str) -> Any:
    """The tree that `text` is, which has ends; all YAML of others is read by this.

    Raises:
        yaml.YAMLError: it is no YAML, also where PyYAML itself raises others, or more than it may be.
    """
    try:
        tree = yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, TypeError, OverflowError, AttributeError, LookupError) as error:
        raise yaml.YAMLError(str(error)) from None
    entries, level = 0, [tree]
    for _ in range(DEEPEST):
        # aliases make a small text a huge tree, or one without an end
        level = [part for whole in level for part in _parts(whole)]
        entries += len(level)
        if not level:
            return tree
        if entries > MOST_ENTRIES:
            break
    raise yaml.YAMLError(f"it is nested more than {DEEPEST} deep, or has more than {MOST_ENTRIES} entries")


def _parts(tree: Any) -> Iterable[Any]:
    if isinstance(tree, dict):
        return tree.values()
    return tree if isinstance(tree, list | tuple | set) else ()


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return `tree` with each `dotted.key=value` set; a value is read as YAML. `rewards.0.weight` reaches into lists."""
    result = _copied(tree)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"override '{override}' is not of the form key=value, such as policy.optimizer.lr=1e-6")
        try:
            value = load_text(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override '{override}' has a value that is not valid YAML: {_one_line(error)}") from None
        _set(result, key, value)
    return result


def tree_leaves(tree: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Every value of a tree under its dotted name; an empty mapping is a value."""
    if isinstance(tree, Mapping) and tree:
        for key, inner in tree.items():
            yield from tree_leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def tree_places(tree: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """Every section, list and value in a tree under its dotted name, outer ones first."""
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(tree, Mapping):
        inner = ((f"{name}.{key}" if name else str(key), value) for key, value in tree.items())
    elif isinstance(tree, list | tuple):
        inner = ((f"{name}[{number}]", value) for number, value in enumerate(tree))
    for path, value in inner:
        yield path, value
        yield from tree_places(value, path)


def _set(tree: Any, key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for depth, name in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        if isinstance(tree, dict) and tree.get(name) is None:
            tree[name] = {}
        tree = tree[_index(tree, name, where, key)]
    tree[_index(tree, leaf, key, key)] = value


def _index(tree: Any, name: str, where: str, key: str) -> Any:
    if isinstance(tree, dict):
        return name
    if isinstance(tree, list):
        if name.isdigit() and int(name) < len(tree):
            return int(name)
        if not tree:
            raise ConfigError(f"override '{key}' names an entry of an empty list; set {where.rpartition('.')[0]} to a list")
        last = f"a number from 0 to {len(tree) - 1}" if len(tree) > 1 else "0"
        raise ConfigError(f"override '{key}' names an entry that the list does not have; {where} must end in {last}")
    above = where.rpartition(".")[0]
    raise ConfigError(f"override '{key}' needs a section at {above}, which is {describe_value(tree)}")


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def _one_line(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    mark = getattr(error, "problem_mark", None)
    return f"{problem}" + (f" (line {mark.line + 1}, column {mark.column + 1})" if mark else "")
