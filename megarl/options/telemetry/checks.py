"""Checks of the section `trackers`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config import AnyConfig
from megarl.errors import ConfigError
from megarl.options.telemetry.section import PrometheusConfig, trackers_of


def check(config: AnyConfig) -> None:
    """Refuse what would be read by nobody.

    Raises:
        ConfigError: arguments of a tracker that is not used, or how an endpoint listens that is not there.
    """
    trackers = trackers_of(config)
    custom = [name for name in trackers.backends if ":" in name]
    for name, arguments in trackers.args.items():
        if name not in custom:
            allowed = f"one of {', '.join(custom)}" if custom else "left out: trackers.backends names no tracker of your own"
            raise ConfigError.of("trackers.args", name, "is no tracker of your own in trackers.backends", allowed=allowed)
        if not isinstance(arguments, dict):
            raise ConfigError.of(f"trackers.args['{name}']", arguments, allowed="a mapping of keyword arguments")
    unset, prometheus = PrometheusConfig(), trackers.prometheus
    for name in ("host", "token_file"):
        field = f"trackers.prometheus.{name}"
        if prometheus.port is None and getattr(prometheus, name) != getattr(unset, name):
            raise ConfigError.needs(field, "a port", f"set trackers.prometheus.port, or remove {field}")


check_supervised = check
