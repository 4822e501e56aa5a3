"""Tracer of a gateway: sampling decisions, and spans of sampled requests.

OpenTelemetry's sampler, as configured by `OTEL_TRACES_SAMPLER`, decides. All of its standard samplers accept
the trace ids below a bound, or follow the parent's decision. The bound is determined once at the start, so a
request that is not sampled costs a random number and a comparison, and allocates nothing. Its engine receives
an unsampled parent, because without a parent it would start its own trace.

Spans of a request:

    chat MODEL            arrival to conclusion; child of the client's span
      ewsjf.queue         in the scheduler's queue; a further one after each put-back
      ewsjf.place         from the decision to its arrival at the gateway
      ewsjf.forward       on a replica; parent of the engine's spans

Spans have lengths, places and outcomes. Failure messages are omitted, because they may quote the prompt.
OpenTelemetry's batch processor exports spans over OTLP on its own thread, as the standard environment
variables configure. Spans that exceed its queue are dropped if the collector is slow; requests never wait.

Export of spans: the exporter that the environment configures, with its failures in the log.

Export of the gateway's server metrics by OTLP, with OpenTelemetry's SDK on its own thread.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from serve_app.core.commands import Dispatch
from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome, SettingsError
from serve_app.request import Submission, TurnEnd
from serve_app.serving.channel.scheduler_client import Grant
from serve_app.serving.gateway.request_log import INSTRUMENTS, ConcludedRequest, Instrument
from serve_app.serving.gateway.tracing import request_trace
from serve_app.serving.gateway.tracing.request_trace import UNTRACED, RequestTrace, TraceParent, trace_parent

logger = logging.getLogger("ray.serve")

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def otlp_exporter() -> SpanExporter:
    """Create the exporter that the environment configures; OTLP over HTTP by default.

    Raises:
        SettingsError: the configured protocol is not supported.
        ImportError: its package is not installed.
    """
    variable = next((name for name in _PROTOCOLS if os.environ.get(name)), "")
    protocol = os.environ.get(variable, "http/protobuf") if variable else "http/protobuf"
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        return WatchedExporter(OTLPSpanExporter())
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcExporter,
        )

        return WatchedExporter(GrpcExporter())
    raise SettingsError(f"{variable} is {protocol!r}: use http/protobuf or grpc")


class WatchedExporter(SpanExporter):
    """Exporter that logs once when the collector becomes unreachable, and once when it recovers."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans; runs on the processor's thread."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - tracing must not affect requests
            result, reason = SpanExportResult.FAILURE, repr(error)
        else:
            reason = "the collector has not taken them"
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                logger.info("event=traces_exported lost_before=%d", self._lost)
            self._lost = 0
            return result
        if not self._lost:
            logger.warning("event=traces_lost spans=%d reason=%r", len(spans), reason)
        self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export buffered spans."""
        return self._exporter.force_flush(timeout_millis)


NANOSECONDS = 1e9
_ERROR = Status(StatusCode.ERROR)
# An answer that ended at a limit or by a filter states neither to the scheduler.
_FINISH_REASONS: Mapping[TurnEnd | None, str] = {TurnEnd.TOOLS: "tool_calls", TurnEnd.DONE: "stop"}

_SERVICE = "ewsjf-gateway"
_ROOT = Context()
# The bits of a trace id by which samplers decide.
_LOW_BITS = (1 << 64) - 1


class SampledTrace(RequestTrace):
    """Spans of one sampled request, on the event loop's clock.

    Args:
        root: span of the request, which has begun.
        operation: name of the operation in the conventions.
        ahead_ns: difference of the wall clock and the monotonic clock, in nanoseconds.
    """

    __slots__ = (
        "_ahead_ns",
        "_below",
        "_forward",
        "_operation",
        "_queued_at",
        "_root",
        "_since",
        "_tracer",
        "trace_id",
    )

    def __init__(self, tracer: Tracer, root: Span, operation: str, ahead_ns: int) -> None:
        self._tracer = tracer
        self._root = root
        self._operation = operation
        self._ahead_ns = ahead_ns
        self._below = set_span_in_context(root)
        self._forward: Span | None = None
        # Time of the first submission, and the start of the current wait.
        self._queued_at = 0.0
        self._since: float | None = None
        self.trace_id = f"{root.get_span_context().trace_id:032x}"

    def queued(self, submission: Submission) -> None:
        """Record the submission to the scheduler."""
        self._queued_at = self._since = time.monotonic()
        spec, root = submission.spec, self._root
        model = spec.served_name
        root.update_name(f"{self._operation} {model}")
        attributes: dict[str, Any] = {
            request_trace.REQUEST_MODEL: model,
            request_trace.REQUEST_STREAM: spec.streamed,
            request_trace.CLASS: submission.priority.value,
            request_trace.TENANT: submission.tenant,
        }
        if spec.max_output_tokens:
            attributes[request_trace.REQUEST_MAX_TOKENS] = spec.max_output_tokens
        if spec.choices != 1:
            attributes[request_trace.REQUEST_CHOICE_COUNT] = spec.choices
        if submission.program is not None:
            attributes[request_trace.CONVERSATION_ID] = submission.program.session
        root.set_attributes(attributes)
        root.add_event(request_trace.QUEUED_EVENT, timestamp=self._epoch_ns(self._queued_at))

    def granted(self, grant: Grant, attempt: int) -> None:
        """Record a grant, and begin an attempt on its replica."""
        now, dispatch = time.monotonic(), grant.dispatch
        since = now if self._since is None else self._since
        # The scheduler has another clock, so only its wait, a difference, is used.
        decided_at = min(max(self._queued_at + dispatch.queue_wait_s, since), now)
        queued: dict[str, Any] = {request_trace.LENGTH_QUEUE: dispatch.length_queue}
        if dispatch.waited is not None:
            queued |= {
                request_trace.WAIT_PREFIX + cause: ns / 1e9 for cause, ns in dispatch.waited.causes.items()
            }
        self._add(request_trace.QUEUE_SPAN, since, decided_at, queued)
        self._root.add_event(request_trace.DISPATCHED_EVENT, timestamp=self._epoch_ns(decided_at))
        self._add(request_trace.PLACE_SPAN, decided_at, now, _placement(dispatch))
        self._since = None
        self._forward = self._tracer.start_span(
            request_trace.FORWARD_SPAN,
            context=self._below,
            kind=SpanKind.CLIENT,
            attributes={
                request_trace.POOL: dispatch.pool,
                request_trace.REPLICA: dispatch.replica_id,
                request_trace.SERVER_ADDRESS: grant.address.host,
                request_trace.SERVER_PORT: grant.address.port,
                request_trace.ATTEMPT: attempt,
            },
            start_time=self._epoch_ns(now),
        )

    def headers(self) -> bytes:
        """Return header lines that make the engine's spans children of the current attempt."""
        context = (self._forward or self._root).get_span_context()
        line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (
            context.trace_id,
            context.span_id,
            context.trace_flags,
        )
        # OpenTelemetry has validated the client's state, so it contains no line breaks.
        state = context.trace_state.to_header().encode()
        return line + b"tracestate: " + state + b"\r\n" if state else line

    def put_back(self, failure: DispatchFailure) -> None:
        """Record a failed attempt, after which the request is queued again."""
        self._since = time.monotonic()
        self._root.add_event(request_trace.PUT_BACK_EVENT, timestamp=self._epoch_ns(self._since))
        if self._forward is not None:
            self._forward.set_attribute(request_trace.PUT_BACK, failure.value)
            if failure is not DispatchFailure.REVOKED:
                self._forward.set_attribute(request_trace.ERROR_TYPE, failure.value)
                self._forward.set_status(_ERROR)
            self._end_forward()

    def forwarded(self, outcome: Outcome) -> None:
        """Record the end in the engine."""
        if self._forward is not None:
            self._forward.set_attribute(request_trace.OUTCOME, outcome.value)
            if outcome is Outcome.FAILED:
                self._forward.set_status(_ERROR)
            self._end_forward()

    def ended(self, record: ConcludedRequest, status: int) -> None:
        """Record the outcome, and end the request's span."""
        if self._since is not None:
            self._add(
                request_trace.QUEUE_SPAN,
                self._since,
                time.monotonic(),
                {request_trace.OUTCOME: record.outcome.value},
            )
        root = self._root
        attributes: dict[str, Any] = {
            request_trace.OUTCOME: record.outcome.value,
            request_trace.REQUEST_ID: record.request_id,
            request_trace.HTTP_RESPONSE_STATUS_CODE: status,
        }
        if record.first_token_at is not None:
            attributes[request_trace.RESPONSE_TIME_TO_FIRST_CHUNK] = record.first_token_at - record.arrived_at
            root.add_event(request_trace.FIRST_CHUNK_EVENT, timestamp=self._epoch_ns(record.first_token_at))
        if record.prompt_tokens or record.output_tokens:
            attributes[request_trace.USAGE_INPUT_TOKENS] = record.prompt_tokens
            attributes[request_trace.USAGE_OUTPUT_TOKENS] = record.output_tokens
        if (usage := record.usage) is not None:
            attributes[request_trace.USAGE_CACHE_READ_INPUT_TOKENS] = usage.cached_tokens
            if usage.reasoning_tokens:
                attributes[request_trace.USAGE_REASONING_OUTPUT_TOKENS] = usage.reasoning_tokens
            if usage.ending in _FINISH_REASONS:
                attributes[request_trace.RESPONSE_FINISH_REASONS] = [_FINISH_REASONS[usage.ending]]
        if record.dispatched_at is not None:
            attributes[request_trace.RESPONSE_MODEL] = record.incoming.submission.spec.served_name
            if record.incoming.response_id:
                attributes[request_trace.RESPONSE_ID] = record.incoming.response_id
        if not record.completed:
            attributes[request_trace.ERROR_TYPE] = record.outcome.value
        root.set_attributes(attributes)
        # By convention, a client's error is no error of the server span.
        if status >= 500 or record.outcome is Outcome.FAILED:
            root.set_status(_ERROR)
        root.end(self._epoch_ns(time.monotonic()))

    def _end_forward(self) -> None:
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.end(self._epoch_ns(time.monotonic()))

    def _add(self, name: str, began_at: float, ended_at: float, attributes: dict[str, Any]) -> None:
        span = self._tracer.start_span(
            name, context=self._below, attributes=attributes, start_time=self._epoch_ns(began_at)
        )
        span.end(self._epoch_ns(ended_at))

    def _epoch_ns(self, at: float) -> int:
        return self._ahead_ns + int(at * NANOSECONDS)


def _placement(dispatch: Dispatch) -> dict[str, Any]:
    return {
        request_trace.POOL: dispatch.pool,
        request_trace.REPLICA: dispatch.replica_id,
        request_trace.LENGTH_QUEUE: dispatch.length_queue,
        request_trace.ESTIMATED_TOKENS: dispatch.estimated_tokens,
    }


class GatewayTracer:
    """Creator of the traces of a gateway's requests; the exporter runs on its own thread."""

    def __init__(self, gateway_id: str, exporter: SpanExporter) -> None:
        self._ids = _ChosenIds()
        self._provider = TracerProvider(
            resource=service_resource(gateway_id),
            id_generator=self._ids,
            # `close` shuts the provider down without waiting for an unreachable collector.
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(request_trace.SCOPE)
        self._bound = _bound(self._provider.sampler)
        self._follows_parents = isinstance(self._provider.sampler, ParentBased)

    def begin(
        self,
        path: str,
        headers: Mapping[bytes, bytes],
        raw: Iterable[tuple[bytes, bytes]],
        arrived_at: float,
    ) -> RequestTrace:
        """Return the trace of a request; see `RequestTracer`."""
        operation = request_trace.OPERATIONS.get(path)
        if operation is None:
            return UNTRACED
        parent = trace_parent(headers)
        if parent is None:
            trace_id = random.getrandbits(128)
        elif self._follows_parents and not parent.is_sampled:
            return UNTRACED
        else:
            trace_id = int(parent.trace_id, 16)
        if trace_id & _LOW_BITS >= self._bound and not (self._follows_parents and parent is not None):
            return UNTRACED
        self._ids.trace_id = trace_id
        # The offset is fixed here; all later times are from the monotonic clock.
        ahead_ns = time.time_ns() - int(time.monotonic() * NANOSECONDS)
        root = self._tracer.start_span(
            operation,
            context=_ROOT if parent is None else _remote(parent, raw),
            kind=SpanKind.SERVER,
            attributes={
                request_trace.OPERATION_NAME: operation,
                request_trace.PROVIDER_NAME: request_trace.PROVIDER,
                request_trace.HTTP_REQUEST_METHOD: "POST",
                request_trace.HTTP_ROUTE: path,
            },
            start_time=ahead_ns + int(arrived_at * NANOSECONDS),
        )
        if not root.is_recording():
            return UNTRACED
        return SampledTrace(self._tracer, root, operation, ahead_ns)

    def unsampled_parent(self) -> bytes:
        """Return a header line with an unsampled parent, so that the engine does not start its own trace."""
        trace_id, span_id = random.getrandbits(128) or 1, random.getrandbits(64) or 1
        return b"traceparent: 00-%032x-%016x-00\r\n" % (trace_id, span_id)

    def close(self, within_s: float) -> None:
        """Export the remaining spans; block for at most `within_s` seconds, even without a collector."""
        ending = threading.Thread(target=self._provider.shutdown, name="end of tracing", daemon=True)
        ending.start()
        ending.join(within_s)


class _ChosenIds(RandomIdGenerator):
    """Generator of trace ids that returns the id on which the sampler decided."""

    def __init__(self) -> None:
        self.trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id or super().generate_trace_id()


def _bound(sampler: Sampler) -> int:
    """Return the least value of a trace id's low bits that a sampler rejects without a parent."""
    least, most = 0, _LOW_BITS + 1
    while least < most:
        middle = (least + most) // 2
        if sampler.should_sample(_ROOT, middle, "").decision is Decision.RECORD_AND_SAMPLE:
            least = middle + 1
        else:
            most = middle
    return least


def _remote(parent: TraceParent, raw: Iterable[tuple[bytes, bytes]]) -> Context:
    state = [value.decode("latin-1") for name, value in raw if name == b"tracestate"]
    context = SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(parent.flags),
        trace_state=TraceState.from_header(state) if state else None,
    )
    return set_span_in_context(NonRecordingSpan(context), _ROOT)


def service_resource(gateway_id: str) -> Resource:
    """Return the resource; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override it."""
    found = Resource.create({SERVICE_INSTANCE_ID: gateway_id})
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: _SERVICE}))
    return found


class OtlpMetrics:
    """Export over HTTP, as the standard environment variables configure; see `gen_ai.MetricExport`."""

    def __init__(self, gateway_id: str) -> None:
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([reader], service_resource(gateway_id), shutdown_on_exit=False)
        meter = self._provider.get_meter(request_trace.SCOPE)
        self._histograms = {
            each: meter.create_histogram(
                each.name, "s", each.text, explicit_bucket_boundaries_advisory=each.bounds_s
            )
            for each in INSTRUMENTS
        }

    def record(self, instrument: Instrument, seconds: float, attributes: Mapping[str, str]) -> None:
        """Add a measurement."""
        self._histograms[instrument].record(seconds, attributes)

    def close(self, within_s: float) -> None:
        """Export the last measurements; block for at most `within_s` seconds, even without a collector."""
        ending = threading.Thread(target=self._provider.shutdown, name="end of metrics", daemon=True)
        ending.start()
        ending.join(within_s)
