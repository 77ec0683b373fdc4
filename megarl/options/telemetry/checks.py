"""Checks of the section `trackers`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.config.supervised import SupervisedConfig
from megarl.errors import ConfigError
from megarl.options.telemetry.section import PrometheusConfig, TrackersConfig, trackers_of


def check(config: Config) -> None:
    """Refuse what nobody would read."""
    _check_trackers(trackers_of(config))


def check_supervised(config: SupervisedConfig) -> None:
    """Refuse what nobody would read."""
    _check_trackers(trackers_of(config))


def _check_trackers(trackers: TrackersConfig) -> None:
    """Refuse what would be read by nobody.

    Raises:
        ConfigError: arguments of a tracker that is not used, or how an endpoint listens that is not there.
    """
    own = [name for name in trackers.backends if ":" in name]
    for name, arguments in trackers.args.items():
        if name not in own:
            allowed = f"one of {', '.join(own)}" if own else "left out: trackers.backends names no tracker of your own"
            raise ConfigError.of("trackers.args", name, "is no tracker of your own in trackers.backends", allowed=allowed)
        if not isinstance(arguments, dict):
            raise ConfigError.of(f"trackers.args['{name}']", arguments, allowed="a mapping of keyword arguments")
    unset, prometheus = PrometheusConfig(), trackers.prometheus
    for field in ("host", "token_file"):
        if prometheus.port is None and getattr(prometheus, field) != getattr(unset, field):
            raise ConfigError.needs(
                f"trackers.prometheus.{field}", "a port", f"set trackers.prometheus.port, or remove trackers.prometheus.{field}"
            )
