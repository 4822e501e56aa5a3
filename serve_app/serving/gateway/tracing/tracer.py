"""Tracer of a gateway: sampling decisions, and spans of sampled requests.

- `GatewayTracer`, `SampledTrace`: the sampling, and the spans of one sampled request.
- `WatchedExporter`: exports spans as the environment configures, with its failures in the log.
- `OtlpMetrics`: exports the gateway's server metrics, with OpenTelemetry's SDK on its own thread.

`GatewayTracer`. OpenTelemetry's sampler, as configured by `OTEL_TRACES_SAMPLER`, decides. All of its standard
samplers accept the trace ids below a bound, or follow the parent's decision. The bound is determined once at
the start, so a request that is not sampled costs a random number and a comparison, and allocates nothing. Its
engine receives an unsampled parent, because without a parent it would start its own trace.

`SampledTrace`. Spans of a request:

    chat MODEL            arrival to conclusion; child of the client's span
      ewsjf.queue         in the scheduler's queue; a further one after each put-back
      ewsjf.place         from the decision to its arrival at the gateway
      ewsjf.forward       on a replica; parent of the engine's spans

Spans have lengths, places and outcomes. Failure messages are omitted, because they may quote the prompt.
OpenTelemetry's batch processor exports spans over OTLP on its own thread, as the standard environment
variables configure. Spans that exceed its queue are dropped if the collector is slow; requests never wait.
"""

import logging
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
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
from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome, SettingsError
from serve_app.request import Submission, TurnEnd
from serve_app.serving.gateway.path import Attempt, Request
from serve_app.serving.gateway.request_log import INSTRUMENTS, Instrument
from serve_app.serving.gateway.tracing import request_trace
from serve_app.serving.gateway.tracing.request_trace import TraceParent, otlp_protocol, trace_parent

logger = logging.getLogger("ray.serve")


def otlp_exporter() -> SpanExporter:
    """Create the exporter that the environment configures; OTLP over HTTP by default.

    Raises:
        SettingsError: the configured protocol is not supported.
        ImportError: its package is not installed.
    """
    variable, protocol = otlp_protocol("TRACES")
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


class SampledTrace:
    """Trace of one sampled request.

    Its spans are made from the request at its end, except for those of attempts, whose ids engines receive.

    Args:
        root: span of the request, which has begun.
        operation: name of the operation in the conventions.
        ahead_ns: difference of the wall clock and the monotonic clock, in nanoseconds.
    """

    __slots__ = ("_ahead_ns", "_attempts", "_below", "_operation", "_root", "_tracer", "trace_id")

    def __init__(self, tracer: Tracer, root: Span, operation: str, ahead_ns: int) -> None:
        self._tracer = tracer
        self._root = root
        self._operation = operation
        self._ahead_ns = ahead_ns
        self._below = set_span_in_context(root)
        # Each with the begin of its wait, the submission to its model, and its span.
        self._attempts: list[tuple[Attempt, float, float, Span]] = []
        self.trace_id = f"{root.get_span_context().trace_id:032x}"

    def begin_attempt(self, request: Request, attempt: Attempt) -> bytes:
        """Begin the span of an attempt, and return header lines that make the engine's spans its children."""
        span = self._tracer.start_span(
            request_trace.FORWARD_SPAN,
            context=self._below,
            kind=SpanKind.CLIENT,
            attributes={
                request_trace.POOL: attempt.dispatch.pool,
                request_trace.REPLICA: attempt.dispatch.replica_id,
                request_trace.SERVER_ADDRESS: attempt.address.host,
                request_trace.SERVER_PORT: attempt.address.port,
                request_trace.ATTEMPT: len(request.attempts),
            },
            start_time=self._epoch_ns(attempt.granted_at),
        )
        self._attempts.append((attempt, self._waited_from(request), request.submitted_at, span))
        context = span.get_span_context()
        line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (
            context.trace_id,
            context.span_id,
            context.trace_flags,
        )
        # OpenTelemetry has validated the client's state, so it contains no line breaks.
        state = context.trace_state.to_header().encode()
        return line + b"tracestate: " + state + b"\r\n" if state else line

    def _waited_from(self, request: Request) -> float:
        """Return the begin of a wait: the submission to the model, or the last put-back from it."""
        ended_at = self._attempts[-1][0].ended_at if self._attempts else None
        return request.submitted_at if ended_at is None else max(request.submitted_at, ended_at)

    def end(self, request: Request, record: RequestRecord, status: int) -> None:
        """Record the request as spans."""
        events = [(at, request_trace.QUEUED_EVENT) for at in _submissions(request)]
        for attempt, since, submitted_at, span in self._attempts:
            dispatch, granted_at = attempt.dispatch, attempt.granted_at
            # The scheduler has another clock, so only its wait, a difference, is used.
            decided_at = min(max(submitted_at + dispatch.queue_wait_s, since), granted_at)
            self._add(request_trace.QUEUE_SPAN, since, decided_at, _wait(dispatch))
            events.append((decided_at, request_trace.DISPATCHED_EVENT))
            self._add(request_trace.PLACE_SPAN, decided_at, granted_at, _placement(dispatch))
            ended_at = record.finished_at if attempt.ended_at is None else attempt.ended_at
            if attempt.failure is not None:
                events.append((ended_at, request_trace.PUT_BACK_EVENT))
            _set_end(span, attempt)
            span.end(self._epoch_ns(ended_at))
        if request.submitted_at and (request.attempt is None or request.attempt.failure is not None):
            outcome = {request_trace.OUTCOME: record.outcome.value}
            self._add(request_trace.QUEUE_SPAN, self._waited_from(request), record.finished_at, outcome)
        if record.first_token_at is not None:
            events.append((record.first_token_at, request_trace.FIRST_CHUNK_EVENT))
        root = self._root
        for at, name in sorted(events, key=itemgetter(0)):
            root.add_event(name, timestamp=self._epoch_ns(at))
        if request.submitted_at:
            root.update_name(f"{self._operation} {request.submission.spec.served_name}")
            root.set_attributes(_submitted(request.submission))
        root.set_attributes(_concluded(request, record, status))
        # By convention, a client's error is no error of the server span.
        if status >= 500 or record.outcome is Outcome.FAILED:
            root.set_status(_ERROR)
        root.end(self._epoch_ns(record.finished_at))

    def _add(self, name: str, began_at: float, ended_at: float, attributes: dict[str, Any]) -> None:
        span = self._tracer.start_span(
            name, context=self._below, attributes=attributes, start_time=self._epoch_ns(began_at)
        )
        span.end(self._epoch_ns(ended_at))

    def _epoch_ns(self, at: float) -> int:
        return self._ahead_ns + int(at * NANOSECONDS)


def _submissions(request: Request) -> list[float]:
    """Return the times at which a request was submitted to a model."""
    earlier = [] if request.fallbacks is None else request.fallbacks.earlier
    return [*earlier, request.submitted_at] if request.submitted_at else []


def _set_end(span: Span, attempt: Attempt) -> None:
    """Set how an attempt ended."""
    failure, outcome = attempt.failure, attempt.outcome
    if failure is not None:
        span.set_attribute(request_trace.PUT_BACK, failure.failure.value)
        if failure.failure is not DispatchFailure.REVOKED:
            span.set_attribute(request_trace.ERROR_TYPE, failure.failure.value)
            span.set_status(_ERROR)
    elif outcome is not None:
        span.set_attribute(request_trace.OUTCOME, outcome.value)
        if outcome is Outcome.FAILED:
            span.set_status(_ERROR)


def _submitted(submission: Submission) -> dict[str, Any]:
    spec = submission.spec
    attributes: dict[str, Any] = {
        request_trace.REQUEST_MODEL: spec.served_name,
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
    return attributes


def _concluded(request: Request, record: RequestRecord, status: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        request_trace.OUTCOME: record.outcome.value,
        request_trace.REQUEST_ID: record.request_id,
        request_trace.HTTP_RESPONSE_STATUS_CODE: status,
    }
    if record.ttft_s is not None:
        attributes[request_trace.RESPONSE_TIME_TO_FIRST_CHUNK] = record.ttft_s
    if record.prompt_tokens or record.output_tokens:
        attributes[request_trace.USAGE_INPUT_TOKENS] = record.prompt_tokens
        attributes[request_trace.USAGE_OUTPUT_TOKENS] = record.output_tokens
    if (usage := request.counts.usage) is not None:
        attributes[request_trace.USAGE_CACHE_READ_INPUT_TOKENS] = usage.cached_tokens
        if usage.reasoning_tokens:
            attributes[request_trace.USAGE_REASONING_OUTPUT_TOKENS] = usage.reasoning_tokens
        if usage.ending in _FINISH_REASONS:
            attributes[request_trace.RESPONSE_FINISH_REASONS] = [_FINISH_REASONS[usage.ending]]
    if record.dispatched_at is not None:
        attributes[request_trace.RESPONSE_MODEL] = request.submission.spec.served_name
        if response_id := request.counts.response_id:
            attributes[request_trace.RESPONSE_ID] = response_id
    if not record.completed:
        attributes[request_trace.ERROR_TYPE] = record.outcome.value
    return attributes


def _wait(dispatch: Dispatch) -> dict[str, Any]:
    waited = {} if dispatch.waited is None else dispatch.waited.causes
    causes = {request_trace.WAIT_PREFIX + cause: ns / 1e9 for cause, ns in waited.items()}
    return {request_trace.LENGTH_QUEUE: dispatch.length_queue, **causes}


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

    def begin(self, request: Request) -> None:
        """Set the trace of a request that is sampled."""
        operation = request.endpoint.operation
        if not operation:
            return
        parent = trace_parent(request.headers)
        if parent is None:
            trace_id = random.getrandbits(128)
        elif self._follows_parents and not parent.is_sampled:
            return
        else:
            trace_id = int(parent.trace_id, 16)
        if trace_id & _LOW_BITS >= self._bound and not (self._follows_parents and parent is not None):
            return
        self._ids.trace_id = trace_id
        # The offset is fixed here; all later times are from the monotonic clock.
        ahead_ns = time.time_ns() - int(time.monotonic() * NANOSECONDS)
        root = self._tracer.start_span(
            operation,
            context=_ROOT if parent is None else _remote(parent, request.exchange.headers),
            kind=SpanKind.SERVER,
            attributes={
                request_trace.OPERATION_NAME: operation,
                request_trace.PROVIDER_NAME: request_trace.PROVIDER,
                request_trace.HTTP_REQUEST_METHOD: "POST",
                request_trace.HTTP_ROUTE: request.path,
            },
            start_time=ahead_ns + int(request.arrived_at * NANOSECONDS),
        )
        if root.is_recording():
            request.trace = SampledTrace(self._tracer, root, operation, ahead_ns)

    def unsampled_parent(self) -> bytes:
        """Return a header line with an unsampled parent, so that the engine does not start its own trace."""
        trace_id, span_id = random.getrandbits(128) or 1, random.getrandbits(64) or 1
        return b"traceparent: 00-%032x-%016x-00\r\n" % (trace_id, span_id)

    def close(self, within_s: float) -> None:
        """Export the remaining spans; block for at most `within_s` seconds, even without a collector."""
        _shut_down(self._provider, within_s)


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
    """Export over HTTP, as the standard environment variables configure; see `request_log.MetricExport`."""

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
        _shut_down(self._provider, within_s)


def _shut_down(provider: TracerProvider | MeterProvider, within_s: float) -> None:
    ending = threading.Thread(target=provider.shutdown, name="end of telemetry", daemon=True)
    ending.start()
    ending.join(within_s)
