"""Telemetry in a run: steps go to trackers, its state to an endpoint, its spans to a collector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config import AnyConfig
from megarl.options.telemetry.endpoint import MetricsEndpoint, open_endpoint
from megarl.options.telemetry.otel import SpanExport, open_span_export
from megarl.options.telemetry.trackers import Trackers, open_trackers, upload_commands
from megarl.runs.observers import RunObserver, RunStart
from megarl.runs.run_checkpoint import CheckpointFolder


class Telemetry(RunObserver):
    """The trackers, endpoint and export that the section `trackers` asks for."""

    trackers: Trackers | None = None
    endpoint: MetricsEndpoint | None = None
    export: SpanExport | None = None

    def __init__(self, config: AnyConfig) -> None:
        self._config = config

    def started(self, start: RunStart) -> None:
        """Open trackers, endpoint and export."""
        self.export = open_span_export(self._config, start.say)
        self.endpoint = open_endpoint(self._config, start.state, is_continued=start.is_continued)
        if self.endpoint is not None:
            self.endpoint.announce()
        self.trackers = open_trackers(self._config, resume_after_step=start.resume_after_step)
        self.trackers.say = start.say

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell every tracker."""
        if self.trackers is not None:
            self.trackers.log(step, metrics)

    def traced(self, step: int, spans: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Send the spans of a step."""
        if self.export is not None:
            self.export.record(step, spans)

    def last_lines(self) -> list[str]:
        """The commands that upload what was written offline."""
        return upload_commands(self._config)

    def close(self) -> None:
        """Close all three; spans that wait are sent first."""
        for opened in (self.export, self.trackers, self.endpoint):
            if opened is not None:
                opened.close()


def observe(config: AnyConfig, checkpoints: CheckpointFolder) -> Telemetry:
    """The telemetry of a run; it is there even if nothing is asked for, and does nothing then."""
    return Telemetry(config)
