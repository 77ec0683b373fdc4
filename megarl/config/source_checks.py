"""Checks of sources of rows: one sentence per contradiction, whichever section holds the source."""

from __future__ import annotations

from megarl.config.sources import FILE_SOURCES, SourceConfig, weight_at
from megarl.errors import ConfigError
from megarl.system.user_code import FORMS

PROCEDURAL_ROWS = 1000
"""Rows of a procedural source whose `limit` is null."""


def check_bounds(low_field: str, low: float | None, high_field: str, high: float | None) -> None:
    """Refuse a lower bound above the upper one."""
    if low is not None and high is not None and low > high:
        raise ConfigError.of(low_field, low, allowed=f"at most {high_field} = {high}")


def check_source(field: str, source: SourceConfig) -> None:
    for name in ("weight", "weight_by_step"):
        unset = type(source).model_fields[name].get_default(call_default_factory=True)
        if (value := getattr(source, name)) != unset:
            raise ConfigError.of(f"{field}.{name}", value, "only the parts of a mixture can have", allowed=f"{unset}")
    if source.source != "mixture":
        _check_single_source(field, source)
        return
    if not source.parts:
        raise ConfigError.needs(f"{field}.source = 'mixture'", "sources to mix", f"set {field}.parts, or choose another source")
    for name in ("name", "path", "split", "args", "keep"):
        if value := getattr(source, name):
            raise ConfigError.of(f"{field}.{name}", value, "a mixture does not read", allowed=f"set in {field}.parts")
    for number, part in enumerate(source.parts):
        if part.source == "mixture":
            raise ConfigError.of(f"{field}.parts[{number}].source", "mixture", allowed="another kind of source")
        if part.weight_by_step and part.weight != 1:
            reason = f"{field}.parts[{number}].weight_by_step replaces"
            raise ConfigError.of(f"{field}.parts[{number}].weight", part.weight, reason, allowed="1.0")
        _check_single_source(f"{field}.parts[{number}]", part)
    for step in sorted({step for part in source.parts for step in part.weight_by_step}):
        if not any(weight_at(part.weight_by_step or {0: part.weight}, step) for part in source.parts):
            raise ConfigError(f"{field}.parts have no weight above 0 at step {step}; one of their weight_by_step must have one")


def _check_single_source(field: str, source: SourceConfig) -> None:
    if source.parts:
        raise ConfigError.needs_set(f"{field}.parts", f"{field}.source = 'mixture'", f"{field}.source")
    for key, (low, high) in source.keep.items():
        check_bounds(f"{field}.keep.{key}[0]", low, f"{field}.keep.{key}[1]", high)
    needs = "path" if source.source in FILE_SOURCES else "name"
    if getattr(source, needs) is None:
        example = {
            "reasoning_gym": "a task such as 'basic_arithmetic'",
            "python": FORMS,
            "dataset": "the folder of rows, or ORG/NAME of the Hugging Face hub",
        }.get(source.source, "the file of rows")
        raise ConfigError.needs(f"{field}.source = '{source.source}'", example, f"set {field}.{needs}")
    if source.split is not None and source.source != "dataset":
        raise ConfigError.of(f"{field}.split", source.split, "only a source = 'dataset' has", allowed="null")
    if source.source == "python" and ":" not in (source.name or ""):
        raise ConfigError.of(f"{field}.name", source.name, allowed=f"{FORMS} with source = 'python'")


def check_held_out(train: SourceConfig, field: str, held_out: SourceConfig) -> None:
    """A procedural row depends on seed + index and the arguments alone: overlapping ranges are the same rows."""
    for a, train_part in enumerate(train.parts or (train,)):
        for b, held_out_part in enumerate(held_out.parts or (held_out,)):
            train_field = f"data.train.parts[{a}]" if train.parts else "data.train"
            _check_ranges(train_field, train_part, f"{field}.parts[{b}]" if held_out.parts else field, held_out_part)


def _check_ranges(train_field: str, train: SourceConfig, field: str, held_out: SourceConfig) -> None:
    same_task = (train.source, train.name, train.args) == (held_out.source, held_out.name, held_out.args)
    if train.source != "reasoning_gym" or not same_task:
        return
    train_end = train.seed + (train.limit or PROCEDURAL_ROWS)
    eval_end = held_out.seed + (held_out.limit or PROCEDURAL_ROWS)
    if train.seed < eval_end and held_out.seed < train_end:
        reason = f"gives rows that {train_field} trains on (seeds {train.seed} to {train_end - 1})"
        raise ConfigError.of(f"{field}.seed", held_out.seed, reason, allowed=f"at least {train_end}")
