"""Checks of `resources.spares` and `resources.shrink`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.config.supervised import SupervisedConfig
from megarl.errors import ConfigError
from megarl.options.elastic.section import shrinks, spares_of


def check(config: Config) -> None:
    """Raise ConfigError for what the fields do not go with."""
    resources = config.resources
    if shrinks(resources) and spares_of(resources) is None:
        raise ConfigError.needs(
            "resources.shrink", "ranks that are replaced", "set resources.spares, to 0 or more, or remove it"
        )
    if shrinks(resources) and all(layout.dp == 1 for layout in config.layouts.values()):
        raise ConfigError.needs_set("resources.shrink", "a layout with replicas", "dp of a layout to 2 or more")


def check_supervised(config: SupervisedConfig) -> None:
    """Raise ConfigError: only runs with rollouts replace ranks."""
    reason = "replaces ranks of runs of reinforcement learning alone; this one starts again from its newest checkpoint"
    if (spares := spares_of(config.resources)) is not None:
        raise ConfigError.of("resources.spares", spares, reason, allowed="left out")
    if shrinks(config.resources):
        raise ConfigError.of("resources.shrink", True, reason, allowed="left out")
