"""Who is told of a run while it goes on: experiment trackers, Prometheus, OpenTelemetry (docs/watching.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.section import ClassPath, Section
from megarl.errors import ConfigError

BackendName = Literal["tensorboard", "wandb", "mlflow", "swanlab"]


class PrometheusConfig(Section):
    """The endpoint that Prometheus asks for metrics and for the state of ranks and engines (docs/watching.md)."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port at which `/metrics` and `/health` are served. 0: a free one. null: there is no endpoint."""
    host: str = "127.0.0.1"
    """Address to listen at. One that other machines can reach needs a token."""
    token_file: str | None = None
    """File with the token that every request must bring. null: the environment variable MEGARL_METRICS_TOKEN, if it is set."""


class TrackersConfig(Section):
    """Who is told of the run in addition to `metrics.jsonl`: experiment trackers, Prometheus, OpenTelemetry."""

    backends: Annotated[tuple[BackendName | ClassPath, ...], Field(strict=False)] = ()
    """Trackers to use: ones that megarl has, or classes of your own. They write into the run folder; WANDB_MODE=online,
    SWANLAB_MODE=online and MLFLOW_TRACKING_URI send to a server."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of trackers of your own, by their name in `backends`."""
    project: str = "megarl"
    """Name of the project (wandb, swanlab) or experiment (mlflow)."""
    entity: str | None = None
    """Team or user that the project belongs to (wandb; swanlab: workspace). null: yours."""
    group: str | None = None
    """Name that groups runs (wandb, swanlab); a tag `group` in mlflow. null: none."""
    tags: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tags of the run in wandb, swanlab and mlflow."""
    notes: str | None = None
    """What the run is for, shown by wandb, swanlab and mlflow. null: nothing."""
    prometheus: PrometheusConfig = PrometheusConfig()
    """The endpoint for Prometheus."""
    opentelemetry: bool = False
    """Send the spans of every step as traces to the OpenTelemetry collector that OTEL_EXPORTER_OTLP_ENDPOINT names."""


def check_trackers(trackers: TrackersConfig) -> None:
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
