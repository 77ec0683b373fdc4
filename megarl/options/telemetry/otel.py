"""The spans of `trace.jsonl` as OpenTelemetry traces, sent by OTLP over HTTP to a collector; see docs/watching.md.

Each step is a trace: below its root are the driver's phases, and below each phase what ranks and engines began in it. A thread
sends them; a collector that cannot be reached is a line, and its spans are lost.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

from megarl.config import AnyConfig
from megarl.errors import ConfigError
from megarl.observe.trace import DRIVER
from megarl.options.telemetry.section import trackers_of
from megarl.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPANS_WAITING = 65536
"""Spans that wait to be sent at most, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise; later ones are dropped."""
LAST_S = 10.0
"""For the last spans to be sent when the run ends."""
_PROTOCOL = "http/protobuf"
_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@dataclass(frozen=True)
class PlacedSpan:
    """A span with its place in the trace of a step. `parent` is the place of another one in the list; None: the root."""

    name: str
    process: str
    """`driver`, or a group and a number such as `policy 0`."""
    begin_s: float
    end_s: float
    parent: int | None


def place_spans(spans: Mapping[str, Sequence[Sequence[Any]]]) -> list[PlacedSpan]:
    """The spans of a row of `trace.jsonl` with their parents: what a process began in a driver's phase is below that phase."""
    phases = sorted((begin, end, name) for name, begin, end in spans.get(DRIVER, ()))
    placed = [PlacedSpan(name, DRIVER, begin, end, None) for begin, end, name in phases]
    for process, process_spans in spans.items():
        if process == DRIVER:
            continue
        for name, begin, end in process_spans:
            around = [index for index, (first, last, _) in enumerate(phases) if first <= begin < last]
            placed.append(PlacedSpan(name, process, begin, end, around[-1] if around else None))
    return placed


def open_span_export(config: AnyConfig, say: Callable[[str], None]) -> SpanExport | None:
    """The export that `trackers.opentelemetry` asks for; None if it is off.

    Raises:
        ConfigError: its packages are not installed, or OTEL_EXPORTER_OTLP_PROTOCOL asks for another protocol.
    """
    if not trackers_of(config).opentelemetry:
        return None
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if os.environ.get(variable, _PROTOCOL) != _PROTOCOL:
            raise ConfigError.of(variable, os.environ[variable], allowed=f"'{_PROTOCOL}' with trackers.opentelemetry, or unset")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(
            "trackers.opentelemetry is true, but megarl[otel] is not installed; pip install 'megarl[otel]', or set it to false"
        ) from None
    return SpanExport(config.run.name, OTLPSpanExporter(), say)


class SpanExport:
    """Takes the spans of every step and has a thread send them by `exporter`."""

    def __init__(self, run: str, exporter: SpanExporter, say: Callable[[str], None]) -> None:
        """`run` is the run's name; `say` is told, once, that spans cannot be sent."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        waiting = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else SPANS_WAITING
        attributes = {"megarl.run": run, "service.version": __version__}
        is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create(attributes | ({} if is_named else {"service.name": "megarl"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_telling(exporter, say), max_queue_size=waiting))
        self._tracer = self._provider.get_tracer("megarl", __version__)
        logging.getLogger(_LOGGER).addFilter(_quiet)

    def record(self, step: int, spans: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Queue the spans of a row of `trace.jsonl`, which has `[name, begin, end]` in seconds since the epoch by process."""
        from opentelemetry import context, trace

        placed = place_spans(spans)
        if not placed:
            return
        begin, end = min(span.begin_s for span in placed), max(span.end_s for span in placed)
        about = {"megarl.step": step}
        root = self._tracer.start_span("step", context.Context(), start_time=_ns(begin), attributes=about)
        otel_spans: list[trace.Span] = []
        for span in placed:
            parent = root if span.parent is None else otel_spans[span.parent]
            group, _, rank = span.process.partition(" ")
            attributes: dict[str, Any] = {**about, "megarl.process": group, **({"megarl.rank": int(rank)} if rank else {})}
            inside = trace.set_span_in_context(parent, context.Context())
            otel_span = self._tracer.start_span(span.name, inside, start_time=_ns(span.begin_s), attributes=attributes)
            otel_span.end(_ns(span.end_s))
            otel_spans.append(otel_span)
        root.end(_ns(end))

    def close(self) -> None:
        """Send what waits, for at most `LAST_S` seconds."""
        last = Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(LAST_S)
        logging.getLogger(_LOGGER).removeFilter(_quiet)


def _quiet(record: logging.LogRecord) -> bool:
    """Drop what the exporter logs, every attempt that fails; `_telling` says it once."""
    return False


def _telling(exporter: SpanExporter, say: Callable[[str], None]) -> SpanExporter:
    """`exporter`, which says in a line when it has failed first."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Telling(SpanExporter):
        has_said = False

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception:  # noqa: BLE001 - whatever a transport raises, the run goes on
                result = SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS and not self.has_said:
                self.has_said = True
                say("spans cannot be sent to the OpenTelemetry collector (OTEL_EXPORTER_OTLP_ENDPOINT); the run goes on")
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Telling()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
