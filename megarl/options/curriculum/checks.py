"""Checks of `data.curriculum`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.config.source_checks import check_bounds
from megarl.config.sources import SourceConfig
from megarl.config.supervised import SupervisedConfig
from megarl.errors import ConfigError
from megarl.options.curriculum.section import CurriculumConfig, curriculum_of


def check(config: Config) -> None:
    """Refuse orders, stages and pass rates that contradict each other or the run."""
    curriculum = curriculum_of(config.data)
    _check_fields(curriculum, config.data.train)
    if curriculum.bounds_pass_rates and not config.rewards:
        remedy = "set rewards, or remove min_pass_rate and max_pass_rate"
        raise ConfigError.needs("data.curriculum", "functions that judge responses for its pass rates", remedy)


def check_supervised(config: SupervisedConfig) -> None:
    """Refuse the same, and pass rates, which given responses have none of."""
    curriculum = curriculum_of(config.data)
    _check_fields(curriculum, config.data.train)
    for name in ("min_pass_rate", "max_pass_rate"):
        if (value := getattr(curriculum, name)) is not None:
            raise ConfigError.of(f"data.curriculum.{name}", value, "only reinforcement learning has", allowed="null")


def _check_fields(curriculum: CurriculumConfig, train: SourceConfig) -> None:
    """Refuse what contradicts itself, and fields that change nothing; what rows have is looked at with the rows."""
    field, defaults = "data.curriculum", CurriculumConfig()
    is_ordered = curriculum.order != "shuffled"
    if (is_ordered or curriculum.stages) and curriculum.key is None:
        raise ConfigError.needs(f"{field}.{'order' if is_ordered else 'stages'}", "a difficulty", f"set {field}.key")
    if curriculum.key is not None and not (is_ordered or curriculum.stages):
        raise ConfigError.needs(f"{field}.key", f"{field}.order or {field}.stages", f"set one of them, or remove {field}.key")
    if curriculum.ordered_epochs is not None and not is_ordered:
        remedy = f"set {field}.order to 'ascending' or 'descending', or remove it"
        raise ConfigError.needs(f"{field}.ordered_epochs", "an order", remedy)
    if curriculum.stages and train.source == "mixture":
        raise ConfigError.needs(f"{field}.stages", "a single source", "set weight_by_step of the parts, or remove the stages")
    for number, stage in enumerate(curriculum.stages):
        name, is_last = f"{field}.stages[{number}]", number == len(curriculum.stages) - 1
        if is_last != (stage.steps is None):
            allowed = "null for the last stage" if is_last else "a whole number"
            raise ConfigError.of(f"{name}.steps", stage.steps, allowed=allowed)
        check_bounds(f"{name}.min", stage.min, f"{name}.max", stage.max)
    low, high = curriculum.min_pass_rate, curriculum.max_pass_rate
    check_bounds(f"{field}.min_pass_rate", low, f"{field}.max_pass_rate", high)
    for setting in () if curriculum.bounds_pass_rates else ("pass_rate_memory", "pause_epochs"):
        if getattr(curriculum, setting) != getattr(defaults, setting):
            remedy = f"set {field}.min_pass_rate or {field}.max_pass_rate, or remove it"
            raise ConfigError.needs(f"{field}.{setting}", "bounds of pass rates", remedy)
