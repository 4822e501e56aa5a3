"""Interface of a request's trace, and the creation of the tracer."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome, SettingsError
from serve_app.request import Submission
from serve_app.serving.channel.scheduler_client import Grant

if TYPE_CHECKING:
    from serve_app.serving.gateway.gen_ai import MetricExport
    from serve_app.serving.gateway.request_log import ConcludedRequest


class RequestTrace:
    """No-op trace of a request that is not sampled; the base of sampled ones, which have a `trace_id`."""

    __slots__ = ()

    trace_id: str = ""

    def queued(self, submission: Submission) -> None:
        """Record the submission to the scheduler."""

    def granted(self, grant: Grant, attempt: int) -> None:
        """Record a grant, and begin an attempt on its replica."""

    def headers(self) -> bytes:
        """Return header lines that make the engine's spans children of the current attempt."""
        return b""

    def put_back(self, failure: DispatchFailure) -> None:
        """Record a failed attempt, after which the request is queued again."""

    def forwarded(self, outcome: Outcome) -> None:
        """Record the end in the engine."""

    def ended(self, record: "ConcludedRequest", status: int) -> None:
        """Record the outcome and the HTTP status sent to the client."""


UNTRACED = RequestTrace()


class RequestTracer(Protocol):
    """Sampler of requests."""

    def begin(
        self,
        path: str,
        headers: Mapping[bytes, bytes],
        raw: Iterable[tuple[bytes, bytes]],
        arrived_at: float,
    ) -> RequestTrace:
        """Return the trace of a request; `UNTRACED` if it is not sampled.

        Args:
            raw: the same headers as received, with repeated ones.
            arrived_at: on the monotonic clock.
        """
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
        from serve_app.serving.gateway.tracing.exporter import otlp_exporter  # noqa: PLC0415
        from serve_app.serving.gateway.tracing.tracer import GatewayTracer  # noqa: PLC0415

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
_METRICS_PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


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
    variable = next((name for name in _METRICS_PROTOCOLS if os.environ.get(name)), "")
    if variable and os.environ[variable] != "http/protobuf":
        raise SettingsError(f"{variable} is {os.environ[variable]!r}: metrics are exported by http/protobuf")
    with _installed():
        from serve_app.serving.gateway.tracing.otlp_metrics import OtlpMetrics  # noqa: PLC0415

        return OtlpMetrics(gateway_id)


def check_tracing() -> None:
    """Raise `SettingsError` if a tracer or an export of metrics cannot be created."""
    tracer = make_tracer("check")
    if tracer is not None:
        tracer.close(0.0)
    export = make_metric_export("check")
    if export is not None:
        export.close(0.0)
