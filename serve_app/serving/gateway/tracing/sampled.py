"""The spans of one sampled request.

    chat MODEL            arrival to conclusion; the client's span is its parent
      ewsjf.queue         in the scheduler's queue; one more after each put-back
      ewsjf.place         from the decision to its arrival here
      ewsjf.forward       on a replica; the engine's spans stand below it

Spans tell lengths, places and outcomes. Why a request failed may repeat its prompt, so that is left out.
"""

import time
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from serve_app.errors import Outcome
from serve_app.metrics.record import RequestRecord
from serve_app.request import Submission
from serve_app.scheduling.commands import Dispatch
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.scheduler_client import Grant
from serve_app.serving.gateway.tracing import names
from serve_app.serving.gateway.tracing.request_trace import RequestTrace

NANOSECONDS = 1e9
_ERROR = Status(StatusCode.ERROR)


class SampledTrace(RequestTrace):
    """Draws up the spans of one request, on the clock of the event loop.

    Args:
        root: the span of the request, which has begun.
        operation: what it does, in the conventions' words.
        ahead_ns: what the clock of the day is ahead of the monotonic one.
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
        # When it was handed to its scheduler for the first time, and when its present wait began.
        self._queued_at = 0.0
        self._since: float | None = None
        self.trace_id = f"{root.get_span_context().trace_id:032x}"

    def queued(self, submission: Submission) -> None:
        """It goes to its scheduler."""
        self._queued_at = self._since = time.monotonic()
        spec, root = submission.spec, self._root
        model = spec.adapter or spec.model
        root.update_name(f"{self._operation} {model}")
        told: dict[str, Any] = {
            names.REQUEST_MODEL: model,
            names.REQUEST_STREAM: spec.streamed,
            names.CLASS: submission.priority.value,
            names.TENANT: submission.tenant,
        }
        if spec.max_output_tokens:
            told[names.REQUEST_MAX_TOKENS] = spec.max_output_tokens
        if spec.choices != 1:
            told[names.REQUEST_CHOICE_COUNT] = spec.choices
        root.set_attributes(told)

    def granted(self, grant: Grant, attempt: int) -> None:
        """It has been given a place on a replica, and is sent there."""
        now, dispatch = time.monotonic(), grant.dispatch
        since = now if self._since is None else self._since
        # The scheduler's clock is another one; the difference of two of its times is as good here.
        decided_at = min(max(self._queued_at + dispatch.queue_wait_s, since), now)
        self._add(names.QUEUE_SPAN, since, decided_at, {names.LENGTH_QUEUE: dispatch.length_queue})
        self._add(names.PLACE_SPAN, decided_at, now, _placement(dispatch))
        self._since = None
        self._forward = self._tracer.start_span(
            names.FORWARD_SPAN,
            context=self._below,
            kind=SpanKind.CLIENT,
            attributes={
                names.POOL: dispatch.pool,
                names.REPLICA: dispatch.replica_id,
                names.SERVER_ADDRESS: grant.address.host,
                names.SERVER_PORT: grant.address.port,
                names.ATTEMPT: attempt,
            },
            start_time=self._epoch_ns(now),
        )

    def headers(self) -> bytes:
        """Lines for the engine, so that its spans stand below that of the present attempt."""
        context = (self._forward or self._root).get_span_context()
        line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (
            context.trace_id,
            context.span_id,
            context.trace_flags,
        )
        # What is left of a client's own has been matched character by character.
        state = context.trace_state.to_header().encode()
        return line + b"tracestate: " + state + b"\r\n" if state else line

    def put_back(self, failure: DispatchFailure) -> None:
        """The replica has not answered it: it goes back to its queue."""
        self._since = time.monotonic()
        if self._forward is not None:
            self._forward.set_attributes({names.PUT_BACK: failure.value, names.ERROR_TYPE: failure.value})
            self._forward.set_status(_ERROR)
            self._end_forward()

    def forwarded(self, outcome: Outcome) -> None:
        """The engine has finished with it."""
        if self._forward is not None:
            self._forward.set_attribute(names.OUTCOME, outcome.value)
            if outcome is Outcome.FAILED:
                self._forward.set_status(_ERROR)
            self._end_forward()

    def ended(self, record: RequestRecord, status: int) -> None:
        """It has reached its outcome."""
        if self._since is not None:
            self._add(names.QUEUE_SPAN, self._since, time.monotonic(), {names.OUTCOME: record.outcome.value})
        root = self._root
        told: dict[str, Any] = {
            names.OUTCOME: record.outcome.value,
            names.REQUEST_ID: record.request_id,
            names.HTTP_RESPONSE_STATUS_CODE: status,
        }
        if record.first_token_at is not None:
            told[names.RESPONSE_TIME_TO_FIRST_CHUNK] = record.first_token_at - record.arrived_at
            root.add_event(names.FIRST_CHUNK_EVENT, timestamp=self._epoch_ns(record.first_token_at))
        if record.prompt_tokens or record.output_tokens:
            told[names.USAGE_INPUT_TOKENS] = record.prompt_tokens
            told[names.USAGE_OUTPUT_TOKENS] = record.output_tokens
        if not record.completed:
            told[names.ERROR_TYPE] = record.outcome.value
        root.set_attributes(told)
        # What a client has done wrong is no error of the server's span.
        if status >= 500 or record.outcome is Outcome.FAILED:
            root.set_status(_ERROR)
        root.end(self._epoch_ns(time.monotonic()))

    def _end_forward(self) -> None:
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.end(self._epoch_ns(time.monotonic()))

    def _add(self, name: str, began_at: float, ended_at: float, told: dict[str, Any]) -> None:
        span = self._tracer.start_span(
            name, context=self._below, attributes=told, start_time=self._epoch_ns(began_at)
        )
        span.end(self._epoch_ns(ended_at))

    def _epoch_ns(self, at: float) -> int:
        return self._ahead_ns + int(at * NANOSECONDS)


def _placement(dispatch: Dispatch) -> dict[str, Any]:
    return {
        names.POOL: dispatch.pool,
        names.REPLICA: dispatch.replica_id,
        names.LENGTH_QUEUE: dispatch.length_queue,
        names.ESTIMATED_TOKENS: dispatch.estimated_tokens,
    }
