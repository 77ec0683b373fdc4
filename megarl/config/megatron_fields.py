"""The fields of megatron-core's config classes and their types, read as text from the installed megatron-core.

Importing the classes would bring torch; their source says the same, of whatever version is installed, in a few milliseconds.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Optional, Union

ConfigClass = Literal["model", "ddp", "optimizer"]
SOURCES: dict[ConfigClass, tuple[tuple[str, str], ...]] = {
    "model": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("transformer/transformer_config.py", "MLATransformerConfig"),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""(file, class) of what a role's model, its data parallelism and its optimizer are built from; a class follows its base."""

_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "None": type(None)}
_ENUMS = ("AttnBackend",)


@dataclass(frozen=True)
class MegatronField:
    """A field by name: the classes that have it, and the type of its values in YAML (None: no YAML value is one)."""

    kinds: frozenset[ConfigClass]
    annotation: Any


@cache
def megatron_fields() -> Mapping[str, MegatronField]:
    """Every field of the installed megatron-core's config classes by its name; none: it is not installed."""
    core = _installed()
    if core is None:
        return {}
    enums = _enums(core)
    by_name: dict[str, MegatronField] = {}
    for kind, classes in SOURCES.items():
        for file, name in classes:
            for statement in _class_body(core / file, name):
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                field = statement.target.id
                if field.startswith("_"):
                    continue
                kinds = by_name[field].kinds if field in by_name else frozenset[ConfigClass]()
                by_name[field] = MegatronField(kinds | {kind}, _type(statement.annotation, enums))
    return by_name


def _installed() -> Path | None:
    try:
        package = importlib.util.find_spec("megatron")  # a namespace: finding it imports nothing
    except ModuleNotFoundError:
        return None
    for folder in package.submodule_search_locations or () if package is not None else ():
        if (Path(folder) / "core" / "model_parallel_config.py").exists():
            return Path(folder) / "core"
    return None


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _class_body(file: Path, name: str) -> list[ast.stmt]:
    return next(node.body for node in _parsed(file).body if isinstance(node, ast.ClassDef) and node.name == name)


def _enums(core: Path) -> dict[str, Any]:
    """Enumerations whose members are given by name, as the types of their names."""
    file = core / "transformer" / "enums.py"
    members = {
        name: tuple(
            target.id
            for statement in _class_body(file, name)
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        )
        for name in _ENUMS
    }
    return {name: Literal[names] for name, names in members.items()}


def _type(node: ast.expr, enums: Mapping[str, Any]) -> Any:
    """The type that an annotation names, of YAML's values; None where there are none, as for functions and torch's types."""
    if isinstance(node, ast.Name):
        return _PLAIN.get(node.id) or enums.get(node.id)
    if isinstance(node, ast.Constant):
        return type(None) if node.value is None else None
    if isinstance(node, ast.BinOp):
        return _union([_type(node.left, enums), _type(node.right, enums)])
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return None
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    outer = node.value.id
    if outer == "Literal":
        return Literal[tuple(ast.literal_eval(part) for part in parts)]
    inner = [_type(part, enums) for part in parts]
    if outer == "Optional":
        return None if inner[0] is None else Optional[inner[0]]  # noqa: UP045  # the type is a value here
    if outer == "Union":
        return _union(inner)
    return list[inner[0]] if outer in ("List", "list") and inner[0] is not None else None  # type: ignore[valid-type]


def _union(members: list[Any]) -> Any:
    """The union of the members that YAML can give."""
    known = [member for member in members if member is not None]
    return Union[tuple(known)] if known and known != [type(None)] else None  # noqa: UP007  # the type is a value here
