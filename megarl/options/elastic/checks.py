"""Checks of the option's fields: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.config.supervised import SupervisedConfig
from megarl.errors import ConfigError
from megarl.options.elastic.section import compared_every, shrinks, spares_of


def check(config: Config) -> None:
    """Raise ConfigError for what the fields do not go with."""
    resources = config.resources
    for field, is_set in (("shrink", shrinks(resources)), ("compare_replicas", bool(compared_every(resources)))):
        if is_set and spares_of(resources) is None:
            remedy = "set resources.spares, to 0 or more, or remove it"
            raise ConfigError.needs(f"resources.{field}", "ranks that are replaced", remedy)
        if is_set and all(layout.dp == 1 for layout in config.layouts.values()):
            raise ConfigError.needs_set(f"resources.{field}", "a layout with replicas", "dp of a layout to 2 or more")


def check_supervised(config: SupervisedConfig) -> None:
    """Raise ConfigError: only runs with rollouts replace ranks."""
    reason = "replaces ranks of runs of reinforcement learning alone; this one starts again from its newest checkpoint"
    if (spares := spares_of(config.resources)) is not None:
        raise ConfigError.of("resources.spares", spares, reason, allowed="left out")
    if every := compared_every(config.resources):
        raise ConfigError.of("resources.compare_replicas", every, reason, allowed="left out")
    if shrinks(config.resources):
        raise ConfigError.of("resources.shrink", True, reason, allowed="left out")
