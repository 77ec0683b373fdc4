"""From a YAML file and overrides to a Config, and back to a file. Every problem becomes one sentence (ConfigError)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megarl.config.checks import check_fields_agree, check_supervised
from megarl.config.option_sections import absent_option
from megarl.config.reference import allowed_values, config_fields, fields_of, section_of, unwrapped
from megarl.config.renamed import FOREIGN, FOREIGN_VALUES, check_renamed, new_names
from megarl.config.schema import Config
from megarl.config.secrets import references, with_environment, without_secrets
from megarl.config.section import Section
from megarl.config.supervised import SupervisedConfig
from megarl.config.yaml_tree import apply_overrides, read_yaml, tree_places
from megarl.errors import ConfigError, MegarlError, nearest
from megarl.option_list import functions
from megarl.system.atomic_files import write_text_atomically

AnyConfig = Config | SupervisedConfig
"""The config of a run, of whatever kind; what is asked of it is in `questions.py`."""
Root = TypeVar("Root", Config, SupervisedConfig)


def load_any(path: str | Path, overrides: Iterable[str] = (), *, default: Mapping[str, Any] | None = None) -> AnyConfig:
    """Read the YAML file at `path`, apply `key=value` overrides, and check everything that needs no model folder.

    `default` has sections for those that the file and the overrides leave out.

    Raises:
        ConfigError: one sentence with the field's dotted name, its value and what it must be.
    """
    tree = apply_overrides(read_yaml(path), overrides)
    added = [name for name in default or {} if name not in tree]
    others = [name for name in tree if name in fields_of(Config) and name not in fields_of(SupervisedConfig)]
    if added and others:
        *names, last = others
        them = f"{', '.join(names)} and {last}" if names else last
        raise ConfigError(
            f"{path} has no section {added[0]}, but has {them}, as runs of `megarl train` have; run it by "
            f"`megarl train {path}`, or add a section {added[0]} and remove {them}"
        )
    return parse_any({**(default or {}), **tree})


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """`load_any` for what only a reinforcement-learning run has: sampling and rewards."""
    return parse_config(apply_overrides(read_yaml(path), overrides))


def parse_any(tree: dict[str, Any]) -> AnyConfig:
    """Make the config that a plain tree describes: with a section `objective` it trains on given responses.

    This is the one place that tells the kinds apart; raises ConfigError as `load_any` does.
    """
    return parse_supervised_config(tree) if "objective" in tree else parse_config(tree)


def parse_config(tree: dict[str, Any], *, is_judged: bool = True) -> Config:
    """Make a Config from a plain tree; raises ConfigError as `load_any` does. Unless it `is_judged`, it may lack rewards."""
    for completed in functions("section", "completed"):
        tree = completed(tree)
    config = _parse(tree, Config)
    check_fields_agree(config, is_judged=is_judged)
    return config


def parse_supervised_config(tree: dict[str, Any]) -> SupervisedConfig:
    """`parse_config` for a run that trains on given responses."""
    config = _parse(tree, SupervisedConfig)
    check_supervised(config)
    return config


def _parse(tree: dict[str, Any], root: type[Root]) -> Root:
    for place in (place for place, value in tree_places(tree) if isinstance(value, str) and "\0" in value):
        raise ConfigError(f"{place} has a null character, which no name and no path may have; remove it")
    tree = with_environment(tree)
    check_renamed(tree)
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    problems.sort(key=lambda problem: problem["type"] not in _UNKNOWN_KEY)
    by_place = {_place(problem, root): problem for problem in reversed(problems)}
    elsewhere = [path for path, problem in reversed(by_place.items()) if _is_of_the_other_kind(path, problem, root)]
    config_errors = [ConfigError(_of_the_other_kind(elsewhere, root))] if elsewhere else []
    config_errors += [_error(problem, tree, root) for path, problem in reversed(by_place.items()) if path not in elsewhere]
    first, *others = config_errors
    if not others:
        raise first
    rest = "; ".join(f"({number}) {other}" for number, other in enumerate(others, start=2))
    raise ConfigError(f"{first}; and {len(others)} more problem{'s' * (len(others) > 1)} in this config: {rest}")


def to_yaml(config: Section) -> str:
    """The resolved config as YAML that reads back to an equal config where the environment has its secrets.

    Every leaf is written out; a comment at the top says which variables stand for secrets, and where.
    """
    tree = without_secrets(config.model_dump(mode="json"))
    wanted = ", ".join(f"{name} ({place})" for name, place in references(tree).items())
    remark = f"# To be in the environment of a run that reads this file: {wanted}\n" if wanted else ""
    return remark + yaml.safe_dump(tree, sort_keys=False, width=120, allow_unicode=True)


def save_resolved(config: Section, path: str | Path) -> None:
    """Write the resolved config to `path` atomically (a reader never sees half a file), for its owner alone."""
    write_text_atomically(path, to_yaml(config), is_private=True)


_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


def _error(problem: ErrorDetails, tree: dict[str, Any], root: type) -> ConfigError:
    path = problem["loc"]
    if problem["type"] in _UNKNOWN_KEY:
        return ConfigError(_unknown_key(path, root))
    field, known = _deepest_field(path, root)
    name = _dotted(known)
    if problem["type"] == "missing" and known == tuple(path):
        return ConfigError(f"{name} is missing; it must be {allowed_values(field)}" if field else f"{name} is missing")
    if problem["type"] == "value_error":
        cause = problem["ctx"]["error"].args[0]
        return cause.under(name, ConfigError) if isinstance(cause, MegarlError) else ConfigError(f"{name}: {cause}")
    allowed = allowed_values(field) if field else problem["msg"]
    choices, value = _choices(field) if field else [], _at(tree, known)
    if isinstance(value, str) and value in choices:  # one of what must be a list
        return ConfigError.of(name, value, allowed=f"{allowed}, such as [{value}]")
    if isinstance(value, Hashable) and (meant := FOREIGN_VALUES.get(name, {}).get(value)):
        return ConfigError.of(name, value, allowed=f"{allowed} (did you mean '{meant}'?)")
    return ConfigError.of(name, value, allowed=allowed, choices=choices)


def _is_of_the_other_kind(place: Sequence[int | str], problem: ErrorDetails, root: type) -> bool:
    """Return whether the key is unknown here, but a field of runs of the other kind."""
    return problem["type"] in _UNKNOWN_KEY and _deepest_field(place, _OTHER[root])[1] == tuple(place)


def _of_the_other_kind(places: Sequence[Sequence[int | str]], root: type) -> str:
    *names, last = map(_dotted, places)
    are = f"{', '.join(names)} and {last} are fields" if names else f"{last} is a field"
    return f"{are} of {_KINDS[_OTHER[root]]}, but this is a config for {_KINDS[root]}"


_OTHER: dict[type, type] = {Config: SupervisedConfig, SupervisedConfig: Config}
_KINDS: dict[type, str] = {
    Config: "`megarl train` by reinforcement learning, without a section objective",
    SupervisedConfig: "`megarl sft`, `reward-model` or `preference`, with a section objective",
}


def _place(problem: ErrorDetails, root: type) -> tuple[int | str, ...]:
    """The place of the problem: the unknown key itself, or the field whose value is wrong."""
    return problem["loc"] if problem["type"] in _UNKNOWN_KEY else _deepest_field(problem["loc"], root)[1]


def _unknown_key(place: Sequence[int | str], root: type) -> str:
    name = _dotted(place)
    if (sentence := absent_option(name)) is not None:
        return sentence
    known = [leaf.name for leaf in config_fields(root) if ".NAME." not in leaf.name]
    _, section_place = _deepest_field(place[:-1], root)
    section: type | None = root
    for key in section_place:
        if section is not None and isinstance(key, str):
            section = section_of(fields_of(section)[key].annotation)
    siblings = [_dotted((*place[:-1], key)) for key in (fields_of(section) if section else ())]
    foreign = [leaf for leaf in FOREIGN.get(str(place[-1]), ()) if leaf in known]
    namesakes = foreign[:1] or [leaf for leaf in known if leaf.rpartition(".")[2] == str(place[-1])]
    namesakes = namesakes or [leaf for leaf in new_names(str(place[-1])) if leaf in known]
    below = [leaf for leaf in namesakes if leaf.startswith(f"{_dotted(place[:-1])}.")]
    if len(below or namesakes) == 1:
        hint = f" (did you mean '{(below or namesakes)[0]}'?)"
    else:
        hint = nearest(name, namesakes) or nearest(name, siblings) or nearest(name, known)
    where = _dotted(place[:-1]) or "the config"
    return f"{name} is not a config field{hint}; {where} has {', '.join(s.rpartition('.')[2] for s in siblings)}"


def _deepest_field(place: Sequence[int | str], root: type) -> tuple[FieldInfo | None, tuple[int | str, ...]]:
    """The field of the schema `root` that `place` points to or into, and its own place."""
    section: type | None = root
    field: FieldInfo | None = None
    known: tuple[int | str, ...] = ()
    for depth, key in enumerate(place):
        if isinstance(key, int) and section is not None:
            known = tuple(place[: depth + 1])
            continue
        if section is None or key not in fields_of(section):
            break
        field = fields_of(section)[str(key)]
        known = tuple(place[: depth + 1])
        section = section_of(field.annotation)
    return field, known


def _choices(field: FieldInfo) -> list[str]:
    return [choice for kind in unwrapped(field.annotation) if get_origin(kind) is Literal for choice in get_args(kind)]


def _at(tree: Any, place: Sequence[int | str]) -> Any:
    for key in place:
        if not (isinstance(key, int) and isinstance(tree, dict)):  # else a list of one was written without the list
            tree = tree[key]
    return tree


def _dotted(place: Sequence[int | str]) -> str:
    text = ""
    for key in place:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text
