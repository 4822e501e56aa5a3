"""OTLP collector for tests: receives spans and histograms over HTTP and records them."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

OK, ERROR = 0, 2
SERVER, CLIENT = 2, 3


@dataclass
class ReceivedSpan:
    """One received span."""

    span: Span
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return _plain(self.span.attributes)

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    def is_within(self, other: "ReceivedSpan") -> bool:
        began, ended = other.span.start_time_unix_nano, other.span.end_time_unix_nano
        return began <= self.span.start_time_unix_nano <= self.span.end_time_unix_nano <= ended


@dataclass
class ReceivedHistogram:
    """The last cumulative values of one histogram with one set of attributes."""

    count: int
    sum_s: float
    bounds_s: tuple[float, ...]
    resource: dict[str, Any]


@dataclass
class Collector:
    """Everything received so far.

    Attributes:
        histograms: by name and attributes.
        raw: bodies of requests with spans.
        status: status of its answers.
    """

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    histograms: dict[tuple[str, frozenset[tuple[str, Any]]], ReceivedHistogram] = field(default_factory=dict)
    raw: list[bytes] = field(default_factory=list)
    status: int = 200

    def take(self, body: bytes) -> None:
        self.raw.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for of_resource in request.resource_spans:
            resource = _plain(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [ReceivedSpan(span, resource) for span in of_scope.spans]

    def take_metrics(self, body: bytes) -> None:
        for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            resource = _plain(of_resource.resource.attributes)
            metrics = [metric for each in of_resource.scope_metrics for metric in each.metrics]
            for metric in metrics:
                assert metric.unit == "s"
                for point in metric.histogram.data_points:
                    key = (metric.name, frozenset(_plain(point.attributes).items()))
                    bounds_s = tuple(point.explicit_bounds)
                    self.histograms[key] = ReceivedHistogram(point.count, point.sum, bounds_s, resource)

    def named(self, name: str) -> list[ReceivedSpan]:
        found = [kept for kept in self.spans if kept.name == name]
        return sorted(found, key=lambda kept: kept.span.start_time_unix_nano)

    def only(self, name: str) -> ReceivedSpan:
        found = self.named(name)
        assert len(found) == 1, [kept.name for kept in self.spans]
        return found[0]

    def only_of(self, trace_id: str, name: str) -> ReceivedSpan:
        found = [kept for kept in self.named(name) if kept.trace_id == trace_id]
        assert len(found) == 1, [(kept.trace_id, kept.name) for kept in self.spans]
        return found[0]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Listen until the block ends."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            take = {"/v1/traces": collector.take, "/v1/metrics": collector.take_metrics}[self.path]
            if collector.status == 200:
                take(body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
