"""Names of spans and attributes, and the creation of the tracer.

Names are OpenTelemetry's conventions where they exist, otherwise `ewsjf.` names. Its Python package marks the
conventions for generative AI as deprecated since they moved, so they are defined here; a test compares them
as long as the package has them. Of the values that clients or engines choose, only names of models, tenants,
requests, answers and conversations are recorded.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from serve_app.errors import SettingsError
from serve_app.serving.gateway.path import Request

if TYPE_CHECKING:
    from serve_app.serving.gateway.request_log import MetricExport


# Generative AI.
CONVERSATION_ID = "gen_ai.conversation.id"
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_REASONING_OUTPUT_TOKENS = "gen_ai.usage.reasoning.output_tokens"

# HTTP and errors.
ERROR_TYPE = "error.type"
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_ROUTE = "http.route"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# Of this project.
ATTEMPT = "ewsjf.attempt"
CLASS = "ewsjf.class"
ESTIMATED_TOKENS = "ewsjf.estimated_tokens"
LENGTH_QUEUE = "ewsjf.length_queue"
OUTCOME = "ewsjf.outcome"
POOL = "ewsjf.pool"
PUT_BACK = "ewsjf.put_back"
REPLICA = "ewsjf.replica"
REQUEST_ID = "ewsjf.request_id"
TENANT = "ewsjf.tenant"
# Seconds of a wait by cause, such as `ewsjf.wait.engines_busy`.
WAIT_PREFIX = "ewsjf.wait."

PROVIDER = "ewsjf"
SCOPE = "ewsjf.gateway"

# Child spans of the request, and its events.
QUEUE_SPAN = "ewsjf.queue"
PLACE_SPAN = "ewsjf.place"
FORWARD_SPAN = "ewsjf.forward"
QUEUED_EVENT = "ewsjf.queued"
DISPATCHED_EVENT = "ewsjf.dispatched"
PUT_BACK_EVENT = "ewsjf.put_back"
FIRST_CHUNK_EVENT = "ewsjf.first_chunk"


class RequestTracer(Protocol):
    """Sampler of requests."""

    def begin(self, request: Request) -> None:
        """Set the trace of a request that is sampled."""
        ...

    def unsampled_parent(self) -> bytes:
        """Return a header line with an unsampled parent, so that the engine does not start its own trace."""
        ...

    def close(self, within_s: float) -> None:
        """Export the remaining spans; block for at most `within_s` seconds."""
        ...


_SAMPLED = 0x01
# Later versions may append fields after a further hyphen; version ff is invalid.
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_NO_TRACE = b"0" * 32
_NO_SPAN = b"0" * 16


class TraceParent(NamedTuple):
    """Trace context of the caller's span; ids are hexadecimal."""

    trace_id: bytes
    span_id: bytes
    flags: int

    @property
    def is_sampled(self) -> bool:
        """True if the caller samples the trace."""
        return bool(self.flags & _SAMPLED)


def trace_parent(headers: Mapping[bytes, bytes]) -> TraceParent | None:
    """Parse the `traceparent` header; None if it is absent or invalid."""
    given = headers.get(b"traceparent")
    if given is None:
        return None
    found = _TRACEPARENT.fullmatch(given)
    if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
        return None
    # Version 00 ends with its flags.
    if given.startswith(b"00") and len(given) != 55:
        return None
    return TraceParent(found[1], found[2], int(found[3], 16))


# Standard variables that disable tracing.
_OFF = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}


def make_tracer(gateway_id: str) -> RequestTracer | None:
    """Create the tracer that the environment configures; None if it disables tracing.

    Raises:
        SettingsError: OpenTelemetry is not installed, or the configuration is not supported.
    """
    if any(os.environ.get(name, "").strip().lower() == value for name, value in _OFF.items()):
        return None
    with _installed():
        from serve_app.serving.gateway.tracing.tracer import (  # noqa: PLC0415
            GatewayTracer,
            otlp_exporter,
        )

        return GatewayTracer(gateway_id, otlp_exporter())


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ImportError as exc:
        raise SettingsError(
            f"gateway.tracing is true, but {exc.name or exc} is not installed: "
            "pip install 'ewsjf-serve[tracing]', or leave gateway.tracing out"
        ) from exc


_METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"


def otlp_protocol(signal: str) -> tuple[str, str]:
    """Return the variable that sets the OTLP protocol of a signal, and the protocol; by default HTTP."""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    variable = next((name for name in names if os.environ.get(name)), "")
    return variable, os.environ.get(variable, "http/protobuf")


def make_metric_export(gateway_id: str) -> "MetricExport | None":
    """Create the export of metrics that the environment configures.

    Many collectors receive only traces, so metrics need a variable of their own: `OTEL_METRICS_EXPORTER=otlp`
    or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`. None without both.

    Raises:
        SettingsError: the configured exporter or protocol is not supported.
    """
    chosen = os.environ.get("OTEL_METRICS_EXPORTER", "").strip().lower()
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or chosen == "none"
    if is_off or not (chosen or os.environ.get(_METRICS_ENDPOINT)):
        return None
    if chosen not in ("", "otlp"):
        raise SettingsError(f"OTEL_METRICS_EXPORTER is {chosen!r}: use otlp or none")
    variable, protocol = otlp_protocol("METRICS")
    if protocol != "http/protobuf":
        raise SettingsError(f"{variable} is {protocol!r}: metrics are exported by http/protobuf")
    with _installed():
        from serve_app.serving.gateway.tracing.tracer import OtlpMetrics  # noqa: PLC0415

        return OtlpMetrics(gateway_id)


def check_tracing() -> None:
    """Raise `SettingsError` if a tracer or an export of metrics cannot be created."""
    tracer = make_tracer("check")
    if tracer is not None:
        tracer.close(0.0)
    export = make_metric_export("check")
    if export is not None:
        export.close(0.0)
