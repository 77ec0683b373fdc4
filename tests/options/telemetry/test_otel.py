"""Spans reach a collector by OTLP over HTTP as in trace.jsonl, below their step and phase; its failures end nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.options.telemetry.otel import open_span_export, place_spans
from tests.config import smallest
from tests.observe.collector import Collector

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs megarl[otel]")

SPANS: dict[str, list[list[Any]]] = {
    "driver": [["generate", 1000.0, 1006.0], ["update", 1006.0, 1009.0]],
    "policy 0": [["forward", 1006.0, 1007.0], ["update", 1007.0, 1008.5]],
    "policy 11": [["update", 1007.25, 1008.75]],
    "engine 0": [["generate", 1000.5, 1006.5], ["generate", 1009.5, 1010.0]],
}


def config(folder: Path, *, opentelemetry: bool = True) -> Config:
    return smallest.config(run={"folder": str(folder), "name": "r"}, trackers={"opentelemetry": opentelemetry})


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        yield collector


def test_a_collector_gets_every_span_in_its_place(collector: Collector, tmp_path: Path) -> None:
    said: list[str] = []
    export = open_span_export(config(tmp_path), said.append)
    assert export is not None
    export.record(4, SPANS)
    export.record(5, {"driver": [["save", 2000.0, 2001.0]]})
    export.close()
    assert said == []
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    about = collector.resource()
    assert (about["service.name"], about["megarl.run"]) == ("megarl", "r")
    found = collector.spans()
    assert len(found) == 10
    assert len({span.trace for span in found}) == 2
    first = [span for span in found if span.attributes["megarl.step"] == 4]
    by_id = {span.id: span for span in first}

    def described(span: Any) -> tuple[str, str, int | None, float, float, str | None]:
        parent = by_id[span.parent].name if span.parent else None
        what = span.attributes
        return (span.name, what.get("megarl.process"), what.get("megarl.rank"), span.begin_s, span.end_s, parent)

    assert sorted(map(described, first), key=lambda one: (one[3], -one[4])) == [
        ("step", None, None, 1000.0, 1010.0, None),
        ("generate", "driver", None, 1000.0, 1006.0, "step"),
        ("generate", "engine", 0, 1000.5, 1006.5, "generate"),
        ("update", "driver", None, 1006.0, 1009.0, "step"),
        ("forward", "policy", 0, 1006.0, 1007.0, "update"),
        ("update", "policy", 0, 1007.0, 1008.5, "update"),
        ("update", "policy", 11, 1007.25, 1008.75, "update"),
        ("generate", "engine", 0, 1009.5, 1010.0, "step"),
    ]


def test_thousands_of_spans_of_a_step_all_arrive(collector: Collector, tmp_path: Path) -> None:
    export = open_span_export(config(tmp_path), pytest.fail)
    assert export is not None
    ranks = {f"policy {rank}": [["update", 100 + at / 100, 100.005 + at / 100] for at in range(100)] for rank in range(64)}
    export.record(1, {"driver": [["update", 100.0, 102.0]], **ranks})
    export.close()
    assert len(collector.spans()) == 2 + 6400


def test_a_service_name_of_ones_own_stays(collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-lab")
    export = open_span_export(config(tmp_path), pytest.fail)
    assert export is not None
    export.record(1, SPANS)
    export.close()
    assert collector.resource()["service.name"] == "my-lab"


def test_a_collector_that_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(400)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    said: list[str] = []
    try:
        export = open_span_export(config(tmp_path), said.append)
        assert export is not None
        for step in range(600):
            export.record(step, {"driver": [["update", 100.0, 102.0]]})
        export.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert said == ["spans cannot be sent to the OpenTelemetry collector (OTEL_EXPORTER_OTLP_ENDPOINT); the run goes on"]
    assert caplog.records == []  # the exporter logs each of the batches that failed


def test_a_span_that_began_between_two_phases_is_below_the_step() -> None:
    placed = place_spans({"driver": [["b", 3.0, 4.0], ["a", 1.0, 2.0]], "policy 0": [["x", 2.5, 3.5], ["y", 3.0, 9.0]]})
    assert [(one.name, one.parent) for one in placed] == [("a", None), ("b", None), ("x", None), ("y", 1)]
    assert place_spans({}) == []


def test_off_is_nothing(tmp_path: Path) -> None:
    assert open_span_export(config(tmp_path, opentelemetry=False), pytest.fail) is None


def test_another_protocol_and_a_missing_package_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'; it must be 'http/protobuf' with"):
        open_span_export(config(tmp_path), pytest.fail)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"trackers\.opentelemetry is true, but megarl\[otel\] is not installed"):
        open_span_export(config(tmp_path), pytest.fail)
