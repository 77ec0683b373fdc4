"""The schema as data: every field's dotted name, type in words, default and description.

What `megarl config` prints, what error sentences quote, and what the size limits of the schema are tested on.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megarl.config.layout import Layout
from megarl.config.presets import PRESETS
from megarl.config.schema import Config
from megarl.config.section import ClassPath, JinjaFile, Section, UserFunction
from megarl.system.user_code import CLASS_FORMS, FORMS

DERIVED = {
    "algorithm.advantage_normalisation": "by algorithm.advantage",
    "algorithm.rollout_correction[].low": "by mode",
    "algorithm.rollout_correction[].high": "by mode",
}
"""Fields whose default follows from another field that is no preset, and how the reference says it."""


@dataclass(frozen=True)
class ConfigField:
    """One config field: `allowed_values` says its type and range in words, `default` how its default is written in YAML."""

    name: str
    allowed_values: str
    default: str
    description: str


def config_fields(root: type = Config) -> list[ConfigField]:
    """All leaves of `root` in schema order; entries of a list of sections are named like `rewards[].weight`, and those of a
    mapping of sections like `rollout.episode.mcp.NAME.url`.

    A section whose fields were listed before, such as a second layout, is one leaf that names the first.
    """
    return list(_leaves_of(root, "", PydanticUndefined, {}))


def section_of(annotation: Any) -> type | None:
    """The section class inside `annotation` (`X`, `X | None`, `tuple[X, ...]`, `Annotated[...]`), or None for a leaf."""
    for candidate in unwrapped(annotation):
        if isinstance(candidate, type) and issubclass(candidate, (Section, Layout)):
            return candidate
    return None


def fields_of(section: type) -> dict[str, FieldInfo]:
    """Field name to its pydantic FieldInfo, for models and for the layout dataclass."""
    fields = getattr(section, "__pydantic_fields__", None)
    return dict(fields) if fields else {}


def allowed_values(field: FieldInfo) -> str:
    """The values that `field` accepts, in words."""
    section = section_of(field.annotation)
    if section is not None:
        words = f"a section with {', '.join(fields_of(section))}"
        return f"a list of sections, each with {', '.join(fields_of(section))}" if _is_list(field.annotation) else words
    words = in_words(field.annotation)
    limits = _limits(field)
    return f"{words} {limits}".strip() if not words.endswith("or null") else f"{words[:-8]} {limits} or null".replace("  ", " ")


def _leaves_of(section: type, prefix: str, instance: Any, listed: dict[type, str]) -> Iterator[ConfigField]:
    for name, field in fields_of(section).items():
        default = getattr(instance, name) if instance is not PydanticUndefined else field.get_default(call_default_factory=True)
        description = (field.description or "").replace("\n", " ")
        inner = section_of(field.annotation)
        if (named := _in_mapping(field.annotation)) is not None:
            yield ConfigField(prefix + name, allowed_values(field), _as_yaml(prefix + name, default), description)
            yield from _leaves_of(named, f"{prefix}{name}.NAME.", PydanticUndefined, listed)
        elif inner is None:
            yield ConfigField(prefix + name, allowed_values(field), _as_yaml(prefix + name, default), description)
        elif inner in listed:
            values = f"{'a list of sections' if _is_list(field.annotation) else 'a section'} like {listed[inner]}"
            if default is None:
                yield ConfigField(prefix + name, f"{values} or null", "null", description)
            else:
                yield ConfigField(prefix + name, values, "[]" if default == () else f"same as {listed[inner]}", description)
        else:
            listed[inner] = prefix + name
            brackets = "[]" if _is_list(field.annotation) else ""
            nested = default if isinstance(default, inner) else PydanticUndefined
            yield from _leaves_of(inner, f"{prefix}{name}{brackets}.", nested, listed)


def _as_yaml(name: str, default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if name in DERIVED:
        return DERIVED[name]
    in_preset = name.removeprefix("algorithm.")
    if in_preset != name and any(_has(preset, in_preset) for preset in PRESETS.values()):
        return "by algorithm.name"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(list(default)) if isinstance(default, tuple) else str(default)


def _has(preset: dict[str, Any], dotted: str) -> bool:
    head, _, rest = dotted.partition(".")
    return head in preset and (not rest or _has(preset[head], rest))


def unwrapped(annotation: Any) -> Iterator[Any]:
    """The types that unions, lists and annotations are made of."""
    origin = get_origin(annotation)
    if origin in (typing.Union, UnionType, tuple, typing.Annotated):
        for argument in get_args(annotation):
            yield from unwrapped(argument)
    else:
        yield annotation


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(
        get_origin(argument) is tuple for argument in get_args(annotation) if get_origin(annotation) is typing.Annotated
    )


def _in_mapping(annotation: Any) -> type | None:
    """The section class of the values of `dict[str, X]`; None of anything else."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def in_words(annotation: Any) -> str:
    """The values of a type, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation == UserFunction:
        return FORMS
    if annotation == ClassPath:
        return CLASS_FORMS
    if annotation == JinjaFile:
        return "path/to/file.jinja"
    if origin is typing.Annotated:
        return in_words(arguments[0])
    if origin in (typing.Union, UnionType):
        words = [in_words(argument) for argument in arguments if argument is not NoneType]
        return " or ".join([*words, *(["null"] if NoneType in arguments else [])])
    if origin is Literal:
        quoted = [f"'{choice}'" for choice in arguments]
        return " or ".join([", ".join(quoted[:-1]), quoted[-1]]) if len(quoted) > 1 else quoted[0]
    if origin is list or (origin is tuple and Ellipsis in arguments):
        if get_origin(arguments[0]) in (Literal, typing.Union, UnionType):
            return f"a list of {in_words(arguments[0])}"
        return "a list of whole numbers" if in_words(arguments[0]) == "a whole number" else "a list of texts"
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    if origin is dict or annotation is dict:
        return "a mapping"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(annotation, str(annotation))


_LIMIT_WORDS = {"ge": "of at least", "gt": "above", "le": "up to", "lt": "below"}


def _limits(field: FieldInfo) -> str:
    marks = [*field.metadata, *_annotated_marks(field.annotation)]
    phrases: list[str] = []
    for mark in marks:
        for inner in [mark, *getattr(mark, "metadata", [])]:
            for key, words in _LIMIT_WORDS.items():
                limit = getattr(inner, key, None)
                if limit is not None and f"{words} {limit}" not in phrases:
                    phrases.append(f"{words} {limit}")
    limits = " and ".join(phrases)
    return re.sub(r"of at least (\S+) and up to", r"from \1 to", limits)


def _annotated_marks(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is typing.Annotated:
        yield from get_args(annotation)[1:]
    for argument in get_args(annotation):
        if get_origin(argument) is typing.Annotated:
            yield from _annotated_marks(argument)
