"""Path of a scheduled request through a gateway: its states, and the common way through them.

| state     | what may happen                                                | next state              |
|-----------|----------------------------------------------------------------|-------------------------|
| READING   | the body arrives and is checked                                | QUEUED, ENDED           |
| QUEUED    | grant, rejection, fallback to another model                    | SENDING, QUEUED, ENDED  |
| SENDING   | the engine answers; failure of the replica, revocation         | ANSWERING, QUEUED, ENDED|
| ANSWERING | chunks, end of the answer; a continuable answer may be stopped | ENDED, QUEUED           |
| ENDED     | nothing; the engine may work on in the background              |                         |

In every state the client may disconnect, and the server may stop. The client has received nothing but
comments before ANSWERING. The common way is a chain of callbacks, without a task, a future or a timer: the
body is complete (`submit`), `on_grant`, the head of the engine's answer, its chunks, its end. Rules:

- Each grant ends with exactly one report (`finish`) or put-back. `open_grant` is the one that has not ended.
- Until the first bytes of an answer that is meant for the client, a failure of a replica puts the request
  back into its queue, invisibly to the client.
- A timeout is final: the engine may still be computing, and the next one would take as long.
- An engine's own error is retried once on another replica. A second one is passed to the client, because the
  request is the likely cause.
- A request to a route that is rejected by one model is submitted to the next one (`routes.Fallbacks`), also
  invisibly to the client.
- After the first byte, a failure ends the stream with an error event, unless another engine continues it
  (`continued`). Nothing is sent twice, and no stream ends without a final event or an error.
- Capacity is released when the engine has finished, not when a slow client has read the answer.
- The scheduler may revoke the grant of a revocable request, unless its answer has begun and cannot be
  continued. The engine is stopped, and the request is put back. The next engine continues what this one has
  generated, if that is possible, also after a failure of the replica.

While a client does not read, pieces stay in the response's bounded buffer, and TCP slows the engine down.

Deviation: the engine streams, and the client receives one JSON object.

Deviation: a stream that another engine can continue, as long as the client lacks its end.

Stage times of a request: for its receipt at the scheduler, and for the client if it requests them.
"""

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from serve_app.core.commands import Dispatch
from serve_app.core.events import DispatchFailure
from serve_app.errors import Conclusion, Outcome
from serve_app.request import DecodeGap, EngineTimes, RequestTimes, Submission, Usage
from serve_app.serving.channel.scheduler_client import ChannelRequest, Grant, RequestOutlook, SchedulerClient
from serve_app.serving.gateway.answer.assembly import (
    AnswerAssembly,
    ContinuableAssembly,
    ContinuableStream,
    NotContinuedError,
)
from serve_app.serving.gateway.answer.responses import (
    JSON_TYPE,
    STOPPING_CODE,
    ClientExchange,
    EngineTimedOut,
    RequestRejected,
    as_rejection,
    encode,
    failure_of,
    outcome_of,
    stopping,
)
from serve_app.serving.gateway.answer.stream import (
    QueuedComments,
    QueueUpdates,
    StreamScanner,
    counts_of,
    engine_failure,
    stream_outcome,
)
from serve_app.serving.gateway.request.fields import (
    RECEIPT_HEADER,
    SERVED_MODEL_HEADER,
    dispatch_lines,
    header_lines,
    response_headers,
    upstream_head,
)
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request_log import ConcludedRequest
from serve_app.serving.gateway.settings import Fallbacks
from serve_app.serving.gateway.stored import BackgroundWork, EngineResponse, ResponseHolders
from serve_app.serving.gateway.telemetry import Telemetry, observe
from serve_app.serving.gateway.upstream import (
    EngineSilentError,
    HeaderList,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)
from serve_app.serving.metric_cells import HistogramCell


class AssembledAnswer:
    """Forwarding of a stream as a non-streamed answer. Failures can be retried until its end."""

    __slots__ = ("_assembly", "_grant", "_has_output", "_request", "_response", "_scanner")

    def __init__(self, request: "GatewayRequest", response: UpstreamResponse, grant: Grant) -> None:
        self._request = request
        self._response = response
        self._grant = grant
        self._scanner = request.scanner = StreamScanner(hide_usage=False)
        self._assembly = request.assembly or AnswerAssembly()
        self._has_output = False

    def on_change(self) -> None:
        """Add the events that have arrived."""
        self._request.guarded(self._advance)

    def _advance(self) -> None:
        response, request = self._response, self._request
        events = self._scanner.feed(response.take())
        if response.complete:
            events += self._scanner.flush()
        self._assembly.feed(events)
        announced = request.announced
        is_output = bool(events) and not (announced is not None and announced.match_all(events))
        if not self._has_output and (is_output or response.complete):
            self._has_output = True
            request.scheduler.first_token(request)
        if response.complete:
            self._end()
        elif response.error is not None:
            raise response.error

    def _end(self) -> None:
        scanner, request = self._scanner, self._request
        status, body = 200, self._assembly.error
        if body is None:
            check_outgrown(request, self._grant)
            body = self._assembly.whole()
        elif scanner.is_engine_error:
            request.check_retry(engine_failure(scanner))
            status = 500
        else:
            status = 400
        request.conclude_stream(scanner)
        headers = response_headers(self._response.headers)
        others = [pair for pair in headers if pair[0] != b"content-type"]
        request.respond_whole(status, [JSON_TYPE, *others], body)


def check_outgrown(request: "GatewayRequest", grant: Grant) -> None:
    """Raise `UpstreamError` if an engine with a longer context can continue the answer."""
    assembly = request.assembly
    if assembly is not None and assembly.outgrows(grant.address.max_model_len):
        raise UpstreamError(DispatchFailure.TOO_LONG, "the answer outgrew the engine's context")


class ContinuedStream:
    """Forwarding of a stream, or of the rest of one. Failures can be retried until its end."""

    __slots__ = ("_gaps", "_grant", "_has_output", "_last_at", "_request", "_response", "_scanner", "_stream")

    def __init__(
        self, request: "GatewayRequest", response: UpstreamResponse, grant: Grant, stream: ContinuableStream
    ) -> None:
        self._request = request
        self._response = response
        self._grant = grant
        self._stream = stream
        self._scanner = request.scanner = StreamScanner(hide_usage=False)
        self._gaps = observe(request.services.telemetry.itl_histogram, request.submission, grant.dispatch)
        self._last_at = 0.0
        self._has_output = False

    def on_change(self) -> None:
        """Pass on the events that have arrived, as soon as the client reads."""
        self._request.guarded(self._advance)

    def _advance(self) -> None:
        response, request, exchange = self._response, self._request, self._request.exchange
        if exchange.is_choked and not response.has_ended:
            exchange.on_writable = self.on_change
            return
        events = self._scanner.feed(response.take())
        if response.complete:
            events += self._scanner.flush()
        self._stream.feed(events)
        if not self._has_output:
            if not events and not response.has_ended:
                return
            if response.error is not None and not events:
                raise response.error
            self._has_output, self._last_at = True, monotonic()
            request.scheduler.first_token(request)
        elif events:
            now = monotonic()
            gap_s = now - self._last_at
            if self._gaps is not None:
                observe(self._gaps.observe, gap_s)
            if gap_s > request.longest_gap_s:
                request.longest_gap_s, request.gap_ended_at = gap_s, now
            self._last_at = now
        if response.complete or self._scanner.error is not None:
            self._end()
            return
        if ready := self._stream.ready():
            self._begin()
            exchange.write_chunk(ready)
            self._stream.drop_ready()
        if response.error is not None:
            raise response.error

    def _begin(self) -> None:
        request = self._request
        if not request.has_begun:
            request.first_token_at = monotonic()
        request.begin_stream(self._response)

    def _end(self) -> None:
        request, scanner = self._request, self._scanner
        if scanner.error is None:
            check_outgrown(request, self._grant)
            events = self._stream.end()
            request.conclude_stream(scanner)
        else:
            failure = engine_failure(scanner)
            if scanner.is_engine_error:
                request.check_retry(failure)
            events = self._stream.ready() + request.broken_stream(failure, scanner)
        self._begin()
        request.finish_stream(events)


def request_times(request: IncomingRequest, granted_at: float | None, waited_until: float) -> RequestTimes:
    """Return the stage times known so far.

    Args:
        granted_at: None if the request ended in the queue.
        waited_until: the last grant, or the end without one.
    """
    first_at, ended_at = request.first_token_at, request.ended_at
    return RequestTimes(
        request.path,
        request.submitted_at - request.arrived_at,
        waited_until - request.submitted_at,
        None if first_at is None or granted_at is None else first_at - granted_at,
        None if ended_at is None or granted_at is None else ended_at - granted_at,
        request.engine_times,
    )


def receipt_line(request: IncomingRequest, dispatch: Dispatch) -> bytes:
    """Return the header line of the receipt for a client that sent `x-ewsjf-receipt: 1`."""
    return RECEIPT_HEADER + b": " + encode(_receipt(request, dispatch)) + b"\r\n"


def receipt_comment(request: IncomingRequest, dispatch: Dispatch) -> bytes:
    """Return the receipt as a comment for the end of an event stream."""
    return b": " + RECEIPT_HEADER[2:] + b" " + encode(_receipt(request, dispatch)) + b"\n\n"


def _receipt(request: IncomingRequest, dispatch: Dispatch) -> dict[str, Any]:
    waited, engine, granted_at = dispatch.waited, request.engine_times, request.granted_at
    inside = {} if engine is None else {"engine_ms": _engine_ms(engine)}
    return {
        "wait_ms": round(dispatch.queue_wait_s * 1e3, 3),
        "causes_ms": {} if waited is None else {cause: ns / 1e6 for cause, ns in waited.causes.items()},
        "ahead": {} if waited is None else waited.ahead,
        "stages_ms": {} if granted_at is None else _stages_ms(request, granted_at, dispatch),
        **inside,
    }


def _stages_ms(request: IncomingRequest, granted_at: float, dispatch: Dispatch) -> dict[str, float]:
    """Return the completed stages under the names that the scheduler's receipts use."""
    stages = request_times(request, granted_at, granted_at).stages(dispatch.queue_wait_s)
    return {name: round(seconds * 1e3, 3) for name, seconds in stages}


def _engine_ms(engine: EngineTimes) -> dict[str, float]:
    """Return the engine's stage times in milliseconds."""
    named = {"queue": engine.queue_s, "prefill": engine.prefill_s, "generation": engine.generation_s}
    return {name: round(seconds * 1e3, 3) for name, seconds in named.items() if seconds is not None}


logger = logging.getLogger("ray.serve")

_EVENT_STREAM = b"text/event-stream"


class State(enum.Enum):
    """State of a scheduled request; see the module."""

    READING = enum.auto()
    QUEUED = enum.auto()
    SENDING = enum.auto()
    ANSWERING = enum.auto()
    ENDED = enum.auto()


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.READING: frozenset({State.QUEUED, State.ENDED}),
    State.QUEUED: frozenset({State.QUEUED, State.SENDING, State.ENDED}),
    State.SENDING: frozenset({State.QUEUED, State.ANSWERING, State.ENDED}),
    State.ANSWERING: frozenset({State.QUEUED, State.ENDED}),
    State.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Services:
    """State shared by all requests of a gateway.

    Attributes:
        schedulers: by model name.
        open: requests that have been submitted and whose answers are incomplete.
        on_end: called after a request has left `open`.
        queue_comment_interval_s: 0 if comments are disabled.
    """

    upstream: UpstreamPool
    telemetry: Telemetry
    holders: ResponseHolders
    background: BackgroundWork
    schedulers: Mapping[str, SchedulerClient]
    open: set["GatewayRequest"]
    on_end: Callable[[], None]
    queue_comment_interval_s: float = 0.0


class GatewayRequest(IncomingRequest, ChannelRequest):
    """A scheduled request in its states.

    Attributes:
        state: state; the client has received nothing but comments before ANSWERING.
        open_grant: whether `grant` has not ended.
        grant: last grant; None before the first one of its model.
        attempts: number of grants.
        response: answer of the current attempt; None without one.
        scanner: scanner of the current attempt's stream; None without one.
        assembly: state of an answer that may be continued, which outlives attempts; None for others.
        has_begun: the client has a part of the answer.
        outcome: outcome; None until it is known.
        longest_gap_s: longest gap between two pieces of a stream, which ended at `gap_ended_at`.
    """

    state = State.READING
    grant: Grant | None = None
    open_grant = False
    attempts = 0
    response: UpstreamResponse | None = None
    scanner: StreamScanner | None = None
    assembly: ContinuableAssembly | None = None
    has_begun = False
    outcome: Outcome | None = None
    longest_gap_s = gap_ended_at = 0.0
    scheduler: SchedulerClient
    _usage: Usage | None = None
    _detail = ""
    # Whether the client reads an event stream, which must end with an event.
    _streams = False
    # Whether the answer may be continued by the engines of this model.
    _continues = False
    _engine_failed = False
    _failure: UpstreamError | None = None
    _is_first_grant = True
    _has_fallen_back = False
    _fallbacks: Fallbacks | None = None
    _comments: QueuedComments | None = None
    _stored: EngineResponse | None = None
    # Of a stream that is passed on.
    _scanner: StreamScanner
    _gaps: HistogramCell | None
    _last_at = 0.0
    _has_room = True
    _events = b""
    # Of an answer that is not streamed.
    _pieces: list[bytes]

    def __init__(self, services: Services, exchange: ClientExchange, own_id: str, arrived_at: float) -> None:
        super().__init__(exchange, own_id, arrived_at)
        self.services = services

    def __repr__(self) -> str:
        return f"<GatewayRequest {self.request_id} {self.state.name.lower()}>"

    # From the gateway.

    def submit(self) -> None:
        """Queue the request, whose body has been read. Everything else follows by callbacks."""
        services, exchange = self.services, self.exchange
        self.id_of_client = "" if self.client_request_id == self.request_id else self.client_request_id
        services.open.add(self)
        observe(services.telemetry.on_arrival, self.submission.spec.model)
        if self.fallbacks:
            self._fallbacks = Fallbacks(self.fallbacks, self.fallback_after_s)
        if self.response_terms is not None:
            self._stored = EngineResponse(self.response_terms, services.holders)
        exchange.on_disconnect = self._on_disconnect
        try:
            if exchange.disconnected:
                self._on_disconnect()
                return
            if services.queue_comment_interval_s or self.queue_form is not None:
                self._start_comments()
            self._queue(self.submission)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._on_error(error)

    def end(self, retry_after_s: float) -> None:
        """End the request because the application stops, with an error event if the answer has begun."""
        if self.outcome is not None:
            return
        if self.has_begun:
            message = "the server stopped during this answer, which is incomplete: send the request again"
            rejection = RequestRejected(Outcome.FAILED, message, code=STOPPING_CODE)
        else:
            rejection = stopping(retry_after_s)
        self._reject(rejection)

    # From the scheduler.

    def on_grant(self, grant: Grant) -> None:
        """Send the request to the granted replica."""
        if self.state is State.ENDED:
            return
        try:
            self._accept(grant)
            self._send(grant)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._on_error(error)

    def on_rejection(self, rejection: Conclusion) -> None:
        """End the request, or submit it to the next model of its route."""
        if self.state is not State.ENDED:
            self._on_error(as_rejection(rejection, self._failure))

    def on_revocation(self) -> None:
        """Stop the attempt of the current grant, unless the answer is complete or cannot be continued."""
        assembly = self.assembly
        if self.has_begun and not isinstance(assembly, ContinuableStream):
            return
        if self.open_grant and not (assembly is not None and assembly.is_complete):
            self._on_error(UpstreamError(DispatchFailure.REVOKED, "the scheduler revoked the grant"))

    def on_outlook(self, outlook: RequestOutlook | None) -> None:
        """Send the client an update about its place in the queue."""
        if self._comments is not None:
            try:
                self._comments.on_outlook(outlook)
            except Exception as error:  # noqa: BLE001 - a request always ends
                self._on_error(error)

    @property
    def seen_tokens(self) -> int:
        """Output tokens seen at least: one for each event, and those with which an answer continues."""
        kept = 0 if self.assembly is None else self.assembly.kept_tokens
        return kept if self.scanner is None else max(kept, self.scanner.events)

    # The common way.

    def _queue(self, submission: Submission) -> None:
        """Submit the request to the scheduler of a model."""
        self._move(State.QUEUED)
        self.submission = submission
        model = submission.spec.model
        self.scheduler = self.services.schedulers[model]
        self._continues = model in self.continuable
        self.submitted_at = monotonic()
        observe(self.trace.queued, submission)
        self.scheduler.submit(self)

    def _accept(self, grant: Grant) -> None:
        self._move(State.SENDING)
        self.grant, self.open_grant = grant, True
        self.granted_at = now = monotonic()
        self.attempts += 1
        submission, dispatch = self.submission, grant.dispatch
        if self._is_first_grant:
            self._is_first_grant = False
            # The submission of a fallback includes the wait at the models before.
            received_at = None if self._has_fallen_back else self.body.received_at
            on_grant = self.services.telemetry.on_grant
            observe(on_grant, dispatch, submission.spec.model, received_at, self.submitted_at, now)
        if self._comments is not None:
            self._comments.on_grant()
        observe(self.trace.granted, grant, self.attempts)
        if submission.bound_to not in (None, dispatch.replica_id):
            raise RequestRejected(
                Outcome.REJECTED_NO_REPLICA,
                "this request needs the replica that stores its response, which the scheduler's release does "
                "not support: upgrade the scheduler",
            )

    def _send(self, grant: Grant) -> None:
        address = grant.address
        name = self._stored.name(address) if self._stored is not None else None
        continuation = self._continuation(grant) if self.continuable else []
        body = self.body_for(self.submission, grant, name, continuation)
        forwarded = self.forwarded + (observe(self.trace.headers) or b"")
        head = upstream_head(self.engine_method, self.path, self.request_id, forwarded, address, len(body))
        self.scanner = None
        self.response = self.services.upstream.start(address.server, head, body, self._on_head)

    def _on_head(self) -> None:
        """Choose how to forward the answer, once its head has arrived."""
        response = self.response
        assert response is not None
        try:
            if response.status:
                response.on_change = self._forwarding(response)
                response.on_change()
            elif response.error is not None:
                self._on_error(response.error)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._on_error(error)

    def _forwarding(self, response: UpstreamResponse) -> Callable[[], None]:
        """Return the callback that forwards an answer of this kind."""
        assert self.grant is not None
        is_stream = response.status == 200 and response.header(b"content-type").startswith(_EVENT_STREAM)
        if is_stream and self.assembles:
            return AssembledAnswer(self, response, self.grant).on_change
        if is_stream and isinstance(self.assembly, ContinuableStream):
            return ContinuedStream(self, response, self.grant, self.assembly).on_change
        if is_stream:
            self.scanner = self._scanner = StreamScanner(hide_usage=self.hide_usage)
            self._events = b""
            return self._on_first_events
        if response.status in (400, 422) and self.assembly is not None and self.assembly.is_continued:
            raise NotContinuedError("the engine rejected the tokens so far")
        self._pieces = []
        return self._on_body

    def _on_first_events(self) -> None:
        """Wait for the first event of a stream that has output.

        Some APIs begin every stream with announcements. Passed on at once, they would commit the client to
        this engine before the prefill, and would count as its first token.
        """
        response = self.response
        assert response is not None
        try:
            events = self._scanner.feed(response.take())
            if response.complete:
                events += self._scanner.flush()
            elif not events:
                if response.error is not None:
                    self._on_error(response.error)
                return
            events = self._events = self._events + events
            announced = self.announced
            if announced is not None and announced.match_all(events) and not response.has_ended:
                return
            self._begin_stream(response, events)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._on_error(error)

    def _begin_stream(self, response: UpstreamResponse, events: bytes) -> None:
        scanner, grant = self._scanner, self.grant
        assert grant is not None
        if scanner.error is not None and scanner.is_engine_error:
            self.check_retry(engine_failure(scanner))
        if self._stored is not None:
            self._stored.on_first_events(events)
        self.first_token_at = self._last_at = monotonic()
        self.scheduler.first_token(self)
        self.begin_stream(response)
        if response.has_ended:
            self._end_stream(events)
            return
        self._gaps = observe(self.services.telemetry.itl_histogram, self.submission, grant.dispatch)
        self.exchange.on_writable = self._on_writable
        self._has_room = self.exchange.write_chunk(events)
        response.on_change = self._on_events

    def _on_events(self) -> None:
        """Pass on the events that have arrived, or end the stream."""
        response = self.response
        assert response is not None
        try:
            if response.has_ended:
                events = self._scanner.feed(response.take())
                self._end_stream(events + self._scanner.flush() if response.complete else events)
            elif response.pieces:
                now = monotonic()
                gap_s = now - self._last_at
                if self._gaps is not None:
                    observe(self._gaps.observe, gap_s)
                if gap_s > self.longest_gap_s:
                    self.longest_gap_s, self.gap_ended_at = gap_s, now
                self._last_at = now
                if self._has_room and (events := self._scanner.feed(response.take())):
                    self._has_room = self.exchange.write_chunk(events)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._on_error(error)

    def _on_writable(self) -> None:
        self._has_room = True
        response = self.response
        if response is None or response.has_ended or not response.pieces:
            return
        try:
            if events := self._scanner.feed(response.take()):
                self._has_room = self.exchange.write_chunk(events)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._on_error(error)

    def _end_stream(self, events: bytes) -> None:
        response = self.response
        assert response is not None
        if response.error is not None:
            events += self.broken_stream(response.error, self._scanner)
        else:
            self.conclude_stream(self._scanner)
        self.finish_stream(events)

    def _on_body(self) -> None:
        """Forward a non-streamed answer once it is complete, so that a failure can be retried."""
        response = self.response
        assert response is not None
        try:
            if response.pieces:
                self._pieces.append(response.take())
            if response.complete:
                self._forward_whole(response, b"".join(self._pieces))
            elif response.error is not None:
                self._on_error(response.error)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._on_error(error)

    def _forward_whole(self, response: UpstreamResponse, body: bytes) -> None:
        failure = failure_of(response.status, response.headers, body)
        if failure is not None:
            self.check_retry(failure)
        if self.has_begun:
            raise NotContinuedError(str(failure or f"the engine answered {response.status} without a stream"))
        outcome = outcome_of(response.status)
        usage = None
        if outcome is Outcome.COMPLETED:
            usage, self.engine_times, self.response_id = counts_of(body)
            if self._stored is not None:
                self._stored.on_answer(body)
        if not self._continues_in_background:
            self._conclude(outcome, usage, str(failure or ""))
        headers = response_headers(response.headers)
        headers, body = self.api.engine_answer(response.status, self.path, headers, body)
        self.respond_whole(response.status, headers, body)

    # Parts of the answer, also for the deviations.

    def respond_whole(self, status: int, headers: HeaderList, body: bytes) -> None:
        """Send a whole answer, and end the request."""
        in_stream = self._begin_answer()
        if in_stream:
            self._streams = False
            self.exchange.write_chunk(self.api.body_event(status, body), ends=True)
        else:
            length = (b"content-length", b"%d" % len(body))
            self.start_response(status, [*headers, length], self._lines())
            self.exchange.write_chunk(body, ends=True)
        self._leave()

    def begin_stream(self, response: UpstreamResponse) -> None:
        """Begin a streamed answer, unless an attempt before has."""
        is_continued = self.has_begun
        in_stream = self._begin_answer()
        if not (is_continued or in_stream):
            self.start_response(200, response_headers(response.headers), self._lines())
        self._streams = True

    def finish_stream(self, events: bytes) -> None:
        """Send the last events, and end the request."""
        assert self.grant is not None
        if RECEIPT_HEADER in self.headers:
            events += receipt_comment(self, self.grant.dispatch)
        self._streams = False
        self.exchange.write_chunk(events, ends=True)
        self._leave()

    def broken_stream(self, error: UpstreamError, scanner: StreamScanner) -> bytes:
        """Conclude a stream that failed after its first byte, and return the error event that ends it."""
        self._conclude(Outcome.FAILED, scanner.usage, str(error))
        message = (
            f"the engine failed during its answer, which is incomplete: send the request again ({error})"
        )
        return self.api.error_event(RequestRejected(Outcome.FAILED, message))

    def conclude_stream(self, scanner: StreamScanner) -> None:
        """Conclude a request whose stream is complete."""
        self.engine_times, self.response_id = scanner.times, scanner.response_id
        usage = scanner.usage if self.assembly is None else self.assembly.counted(scanner.usage)
        self._conclude(stream_outcome(scanner), usage, scanner.error or "")

    def check_retry(self, failure: UpstreamError) -> None:
        """Raise if another replica or model may serve the request.

        An engine's own error is retried once on another replica; a second one is the client's, because the
        request is the likely cause.

        Raises:
            UpstreamError: the failure, for another replica.
            RequestRejected: another model remains.
        """
        if failure.failure is not DispatchFailure.ENGINE_ERROR:
            raise failure
        if not self._engine_failed:
            self._engine_failed = True
            raise failure
        if self._fallbacks is not None and self._fallbacks.remain:
            raise RequestRejected(Outcome.FAILED, str(failure))

    def guarded(self, call: Callable[[], None]) -> None:
        """Call a function; an error puts the request back or ends it."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._on_error(error)

    def _begin_answer(self) -> bool:
        """Mark the answer as begun; return whether a comment has begun it as a stream."""
        if self.state is not State.ANSWERING:
            self._move(State.ANSWERING)
        self.has_begun = True
        if self.assembly is None:
            self.body.release()
        if self._comments is None:
            return False
        self._comments.stop()
        return self._comments.begun

    def _lines(self) -> bytes:
        """Return the gateway's own header lines."""
        assert self.grant is not None
        dispatch = self.grant.dispatch
        lines = self.id_lines + dispatch_lines(dispatch)
        if self.route:
            served = self.submission.spec.served_name.encode("latin-1", "replace")
            lines += header_lines([(SERVED_MODEL_HEADER, served)])
        if RECEIPT_HEADER in self.headers:
            lines += receipt_line(self, dispatch)
        return lines

    # Deviations.

    def _start_comments(self) -> None:
        if not self.submission.spec.streamed or self.assembles:
            return
        exchange, interval_s = self.exchange, self.services.queue_comment_interval_s
        if self.queue_form is None:
            self._comments = QueuedComments(exchange, interval_s, self.id_lines)
        else:
            self._comments = QueueUpdates(
                exchange, interval_s, self.id_lines, self.queue_form, lambda: self.scheduler.watch(self)
            )
        self._comments.start()

    def _on_error(self, error: Exception) -> None:
        """Put the request back, submit it to another model, or end it."""
        try:
            match error:
                case _ if self.state is State.ENDED:
                    logger.error("event=gateway_error request_id=%s", self.request_id, exc_info=error)
                case EngineSilentError():
                    self._end_or_fall_back(EngineTimedOut(f"the engine did not answer in time: {error}"))
                case UpstreamError():
                    self._put_back(error)
                case NotContinuedError() if not self.has_begun and self.grant is not None:
                    self._begin_anew(self.grant)
                case NotContinuedError():
                    self._reject(RequestRejected(Outcome.FAILED, f"the answer is incomplete: {error}"))
                case RequestRejected():
                    self._end_or_fall_back(error)
                case _:
                    self._fail(error)
        except Exception as further:  # noqa: BLE001 - a request always ends
            self._fail(further)

    def _put_back(self, failure: UpstreamError) -> None:
        grant, self._failure = self.grant, failure
        assert grant is not None
        self._close_response()
        self._move(State.QUEUED)
        self.open_grant = False
        observe(self.services.telemetry.put_back, self.submission.spec.model, failure.failure)
        observe(self.trace.put_back, failure.failure)
        kept = 0 if self.assembly is None else self.assembly.kept_tokens
        self.scheduler.put_back(self, failure.failure, str(failure), kept, failure.retry_after_s)

    def _begin_anew(self, grant: Grant) -> None:
        """Send the request again as a whole, because its engine cannot continue the answer."""
        self._close_response()
        self.assembly, self._continues = None, False
        self._send(grant)

    def _continuation(self, grant: Grant) -> list[bytes]:
        """Return the fields by which an engine continues the answer, or begins one that can be continued.

        Raises:
            NotContinuedError: the engine cannot continue an answer of which the client has a part.
        """
        # Only engines like vLLM have these fields: those that name responses.
        if not (self._continues and grant.address.names_responses):
            if self.has_begun:
                raise NotContinuedError("the next engine cannot continue it")
            self.assembly = None
            return []
        if self.assembly is None or not self.assembly.kept_tokens:
            spec = self.submission.spec
            longest, limit = self.continuable[spec.model], spec.max_output_tokens
            is_chat = spec.shape.messages > 0
            self.assembly = (
                ContinuableAssembly(limit, is_chat=is_chat, longest=longest)
                if self.assembles
                else ContinuableStream(limit, is_chat=is_chat, longest=longest, hide_usage=self.hide_usage)
            )
        return self.assembly.begin_attempt()

    def _end_or_fall_back(self, rejection: RequestRejected) -> None:
        fallbacks = self._fallbacks
        if fallbacks is None or self.has_begun:
            self._reject(rejection)
            return
        try:
            following = fallbacks.following(rejection, monotonic() - self.arrived_at)
        except RequestRejected as best:
            self._reject(best)
            return
        self._fall_back(following, rejection)

    def _fall_back(self, submission: Submission, rejection: RequestRejected) -> None:
        """Submit the request to the next model of its route."""
        telemetry, before = self.services.telemetry, self.submission.spec.model
        self._close_response()
        self._report_end(rejection.outcome)
        observe(telemetry.on_departure, before)
        observe(telemetry.on_arrival, submission.spec.model)
        observe(telemetry.on_fallback, self.route, before, submission.spec.model, rejection.outcome)
        self.grant, self.granted_at, self._engine_failed = None, None, False
        self.assembly, self._failure, self._is_first_grant = None, None, True
        watches, self.watches_queue = self.watches_queue, False
        self._has_fallen_back = True
        self._queue(submission)
        if watches:
            self.scheduler.watch(self)

    # The end.

    def _on_disconnect(self) -> None:
        if self.state is State.ENDED:
            return
        try:
            self._withdraw()
            if not self._continues_in_background:
                usage = None if self.scanner is None or self.assembly is not None else self.scanner.usage
                self._conclude(Outcome.CANCELLED, usage, "the client closed its connection")
            self._leave()
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._fail(error)

    def _reject(self, rejection: RequestRejected, detail: str | None = None) -> None:
        """End the request with an error: as the response or, if a stream is open, as an event."""
        self._withdraw()
        self._conclude(rejection.outcome, detail=rejection.message if detail is None else detail)
        comments = self._comments
        if comments is not None:
            comments.stop()
            if comments.begun and not self.has_begun:
                self._streams = True
        if self._streams:
            self._streams = False
            event = self.api.error_event(rejection)
            if isinstance(self.assembly, ContinuableStream):
                event = self.assembly.ready() + event
            self.exchange.write_chunk(event, ends=True)
        elif not self.has_begun:
            waited_ms = (monotonic() - self.arrived_at) * 1000
            self.reject(rejection, (b"x-queue-wait-ms", b"%.1f" % waited_ms))
        self._leave()

    def _fail(self, error: Exception) -> None:
        """End the request because of an error of the gateway itself."""
        logger.error("event=gateway_error request_id=%s", self.request_id, exc_info=error)
        message = "internal error of the gateway; see its log"
        try:
            if self.state is not State.ENDED:
                self._reject(RequestRejected(Outcome.FAILED, message, status=500), repr(error))
        except Exception:
            logger.exception("event=gateway_error request_id=%s", self.request_id)
            if self.state is not State.ENDED:
                self._leave()
            self.exchange.fail()

    def _withdraw(self) -> None:
        """Stop the attempt, or the wait in the queue."""
        self._close_response()
        if self.state is State.QUEUED:
            self.scheduler.cancel(self)

    def _close_response(self) -> None:
        if self.response is not None:
            if self.scanner is not None:
                # What a slow client has not read counts.
                self.scanner.feed(self.response.take())
            self.response.close()
            self.response = None
            self.exchange.on_writable = None

    def _conclude(self, outcome: Outcome, usage: Usage | None = None, detail: str = "") -> None:
        """Set the outcome and release the grant; only the first call sets the outcome."""
        is_first = self.outcome is None
        if is_first:
            self.outcome, self._usage, self._detail = outcome, usage, detail
        if is_first or self.open_grant:
            self._report_end(outcome, usage)

    def _report_end(self, outcome: Outcome, usage: Usage | None = None) -> None:
        """Report the end at one model to its scheduler, which releases the grant."""
        self.ended_at = now = monotonic()
        if self.open_grant:
            self.open_grant = False
            observe(self.trace.forwarded, outcome)
            granted_at = self.granted_at
            times = request_times(self, granted_at, now if granted_at is None else granted_at)
            self.scheduler.finish(self, outcome, usage, times, self._longest_gap(now))
        elif self.state is not State.READING:
            self.scheduler.note_end(self, outcome, request_times(self, None, now))

    def _longest_gap(self, now: float) -> DecodeGap | None:
        return DecodeGap(self.longest_gap_s, now - self.gap_ended_at) if self.longest_gap_s else None

    @property
    def _continues_in_background(self) -> bool:
        """Whether the engine continues a background response after the client's request has ended."""
        return self.open_grant and self._stored is not None and self._stored.is_running

    def _leave(self) -> None:
        """Enter the last state, and record the request, unless its engine continues in the background."""
        self._close_response()
        self._move(State.ENDED)
        if self._comments is not None:
            self._comments.stop()
        self.body.release()
        self.exchange.on_disconnect = self.exchange.on_writable = None
        self.services.open.discard(self)
        if self._continues_in_background:
            assert self._stored is not None
            assert self.grant is not None
            self.services.background.follow(
                self._stored.response_id, self.grant.address, self._on_background_end
            )
        else:
            self._record()
        self.services.on_end()

    def _on_background_end(self, outcome: Outcome, usage: Usage | None, detail: str) -> None:
        self._conclude(outcome, usage, detail)
        self._record()

    def _record(self) -> None:
        telemetry = self.services.telemetry
        observe(telemetry.on_departure, self.submission.spec.model)
        submission, usage = self.submission, self._usage
        dispatch: Dispatch | None = self.grant.dispatch if self.grant is not None else None
        observe(
            telemetry.on_conclusion,
            ConcludedRequest(
                request_id=submission.request_id,
                arrived_at=self.arrived_at,
                dispatched_at=self.granted_at,
                first_token_at=self.first_token_at,
                finished_at=monotonic(),
                outcome=self.outcome or Outcome.FAILED,
                prompt_tokens=usage.prompt_tokens if usage is not None else 0,
                output_tokens=usage.output_tokens if usage is not None else 0,
                tenant=submission.tenant,
                priority=submission.priority,
                pool=dispatch.pool if dispatch is not None else "",
                replica=dispatch.replica_id if dispatch is not None else "",
                length_queue=dispatch.length_queue if dispatch is not None else "",
                estimated_tokens=dispatch.estimated_tokens if dispatch is not None else None,
                detail=self._detail,
                model=submission.spec.model,
                route=self.route,
                incoming=self,
                endpoint=self.path,
                key_id=submission.key.key_id if submission.key is not None else "",
                attempts=self.attempts,
                usage=usage,
                status=self.exchange.status,
            ),
        )

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a request cannot be {state.name} after {self.state.name}")
        self.state = state
