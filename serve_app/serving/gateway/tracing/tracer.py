"""The tracer of a gateway: it decides which requests are sampled, and begins their traces.

OpenTelemetry's own sampler decides, as `OTEL_TRACES_SAMPLER` says. Each of those that the variable may name
takes the trace ids below a bound, or does as the request's parent says. The bound is found out once. So a
request that is not sampled costs a random number and a comparison, and nothing is built for it. Its engine is
told, too: an engine that hears of no parent would begin a trace of its own.
"""

import random
import threading
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from serve_app.engines.engine import Scope
from serve_app.serving.gateway.tracing import names
from serve_app.serving.gateway.tracing.request_trace import UNTRACED, RequestTrace
from serve_app.serving.gateway.tracing.sampled import NANOSECONDS, SampledTrace
from serve_app.serving.gateway.tracing.trace_context import TraceParent, trace_parent

_SERVICE = "ewsjf-gateway"
_ROOT = Context()
# Of a trace id, those by which samplers decide.
_LOW_BITS = (1 << 64) - 1


class GatewayTracer:
    """Begins the traces of a gateway's requests.

    Args:
        gateway_id: names this process among others of the service.
        exporter: takes spans away, on a thread of its own.
    """

    def __init__(self, gateway_id: str, exporter: SpanExporter) -> None:
        self._ids = _ChosenIds()
        self._provider = TracerProvider(
            resource=_resource(gateway_id),
            id_generator=self._ids,
            # The gateway ends it itself, and does not wait for a collector that is gone.
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(names.SCOPE)
        self._bound = _bound(self._provider.sampler)
        self._follows_parents = isinstance(self._provider.sampler, ParentBased)

    def begin(
        self, scope: Scope, path: str, headers: Mapping[bytes, bytes], arrived_at: float
    ) -> RequestTrace:
        """The trace of a request that has just arrived, if it is sampled.

        Args:
            arrived_at: on the monotonic clock, in seconds.
        """
        operation = names.OPERATIONS.get(path)
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
        # Both clocks are read at the same moment; from here on only the monotonic one is.
        ahead_ns = time.time_ns() - int(time.monotonic() * NANOSECONDS)
        root = self._tracer.start_span(
            operation,
            context=_ROOT if parent is None else _remote(parent, scope),
            kind=SpanKind.SERVER,
            attributes={
                names.OPERATION_NAME: operation,
                names.PROVIDER_NAME: names.PROVIDER,
                names.HTTP_REQUEST_METHOD: "POST",
                names.HTTP_ROUTE: path,
            },
            start_time=ahead_ns + int(arrived_at * NANOSECONDS),
        )
        if not root.is_recording():
            return UNTRACED
        return SampledTrace(self._tracer, root, operation, ahead_ns)

    def unsampled_parent(self) -> bytes:
        """A line that tells an engine of a trace that nobody keeps."""
        trace_id, span_id = random.getrandbits(128) or 1, random.getrandbits(64) or 1
        return b"traceparent: 00-%032x-%016x-00\r\n" % (trace_id, span_id)

    def close(self, within_s: float) -> None:
        """Send what is left; blocks for so long at most, also when the collector is gone."""
        ending = threading.Thread(target=self._provider.shutdown, name="end of tracing", daemon=True)
        ending.start()
        ending.join(within_s)


class _ChosenIds(RandomIdGenerator):
    """Gives the next trace the id for which the sampler has been asked."""

    def __init__(self) -> None:
        self.trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id or super().generate_trace_id()


def _bound(sampler: Sampler) -> int:
    """The least number, of the low bits of a trace id, that a sampler does not take without a parent."""
    least, most = 0, _LOW_BITS + 1
    while least < most:
        middle = (least + most) // 2
        if sampler.should_sample(_ROOT, middle, "").decision is Decision.RECORD_AND_SAMPLE:
            least = middle + 1
        else:
            most = middle
    return least


def _remote(parent: TraceParent, scope: Scope) -> Context:
    state = [value.decode("latin-1") for name, value in scope["headers"] if name == b"tracestate"]
    context = SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(parent.flags),
        trace_state=TraceState.from_header(state) if state else None,
    )
    return set_span_in_context(NonRecordingSpan(context), _ROOT)


def _resource(gateway_id: str) -> Resource:
    """What the spans say of their process; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` count more."""
    found = Resource.create({SERVICE_INSTANCE_ID: gateway_id})
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: _SERVICE}))
    return found
