"""OTLP collector for tests: receives spans over HTTP and records them."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
class Collector:
    """Everything received so far.

    Attributes:
        raw: bodies of requests.
        status: status of its answers.
    """

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    status: int = 200

    def take(self, body: bytes) -> None:
        self.raw.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for of_resource in request.resource_spans:
            resource = _plain(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [ReceivedSpan(span, resource) for span in of_scope.spans]

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
            assert self.path == "/v1/traces"
            if collector.status == 200:
                collector.take(body)
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
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
