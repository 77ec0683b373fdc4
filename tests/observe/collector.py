"""A collector of traces for tests: takes OTLP over HTTP on this machine and decodes what came."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self


@dataclass(frozen=True)
class CollectedSpan:
    """A span; ids are bytes, and `parent` is empty for a root."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    begin_s: float
    end_s: float
    attributes: dict[str, Any]


class Collector:
    """As a context manager it listens at `address`; `requests` are the paths and bodies that came."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                requests.append((self.path, body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing to tell."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self) -> list[CollectedSpan]:
        """Every span that came."""
        return [
            CollectedSpan(
                span.name,
                span.trace_id,
                span.span_id,
                span.parent_span_id,
                span.start_time_unix_nano / 1e9,
                span.end_time_unix_nano / 1e9,
                _plain(span.attributes),
            )
            for batch in self._batches()
            for scope in batch.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, Any]:
        """What the first batch says of its sender."""
        return _plain(self._batches()[0].resource.attributes)

    def _batches(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return [batch for _, body in self.requests for batch in ExportTraceServiceRequest.FromString(body).resource_spans]


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
