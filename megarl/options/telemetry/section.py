"""The section `trackers`: experiment trackers, Prometheus, OpenTelemetry (docs/watching.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import ClassPath, Section

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


DESCRIPTION = "Who is told of the run in addition to `metrics.jsonl`: experiment trackers, Prometheus, OpenTelemetry."
FIELDS = tuple(
    AddedField(run, "trackers", TrackersConfig, TrackersConfig(), DESCRIPTION) for run in ("Config", "SupervisedConfig")
)
trackers_of = FIELDS[0].of
"""The section `trackers` of a run's config."""
