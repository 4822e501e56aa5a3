"""A request in a gateway: its states, from its head to its record, and how its answer is forwarded.

| state     | what may happen                                                | next state              |
|-----------|----------------------------------------------------------------|-------------------------|
| READING   | the body arrives and is checked                                | QUEUED, ENDED           |
| QUEUED    | grant, rejection, fallback to another model                    | SENDING, QUEUED, ENDED  |
| SENDING   | the engine answers; failure of the replica, revocation         | ANSWERING, QUEUED, ENDED|
| ANSWERING | chunks, end of the answer; a continuable answer may be stopped | ENDED, QUEUED           |
| ENDED     | nothing; the engine may work on in the background              |                         |

Requests that are not scheduled stay in READING. In every state the client may disconnect, and the server may
stop. Before the first ANSWERING the client has received nothing but comments. The common way is a chain of
callbacks: the body is complete (`submit`), `on_grant`, the head of the engine's answer (`_on_head`), its
chunks (`Answer.on_change`), its end (`_leave`). It needs no future, no task unless the body arrives in parts,
and for a stream one timer, that of comments. Rules:

- Each grant is an attempt, which ends with exactly one report (`finish`) or put-back.
- Until the first bytes of an answer that is meant for the client, a failure of a replica puts the request
  back into its queue, invisibly to the client.
- A timeout is final: the engine may still be computing, and the next one would take as long.
- An engine's own error is retried once on another replica. A second one is passed to the client, because the
  request is the likely cause.
- A request to a route that is rejected by one model is submitted to the next one (`Fallbacks`), also
  invisibly to the client.
- After the first byte, a failure ends the stream with an error event, unless another engine continues it
  (`ContinuedStream`). Nothing is sent twice, and no stream ends without a final event or an error.
- Capacity is released when the engine has finished, not when a slow client has read the answer.
- The scheduler may revoke the grant of a revocable request, unless its answer has begun and cannot be
  continued. The engine is stopped, and the request is put back. The next engine continues what this one has
  generated, if that is possible, also after a failure of the replica.

While a client does not read, pieces stay in the response's bounded buffer, and TCP slows the engine down.

Observers (`RequestObserver`, `RequestTrace`) read the request; their errors do not change what happens to it.
"""

import asyncio
import contextlib
import enum
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from types import MappingProxyType
from typing import Protocol, TypeVar
from urllib.parse import parse_qs

from msgspec import Struct
from msgspec.structs import replace

from serve_app.core.commands import Dispatch
from serve_app.core.events import DispatchFailure
from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Conclusion, Outcome
from serve_app.request import DecodeGap, RequestSpec, RequestTimes, Submission, Usage
from serve_app.serving.channel.scheduler_client import (
    ChannelRequest,
    ReplicaAddress,
    RequestOutlook,
    SchedulerClient,
)
from serve_app.serving.gateway.answer.assembly import (
    AnswerAssembly,
    ContinuableAssembly,
    ContinuableStream,
    NotContinuedError,
)
from serve_app.serving.gateway.answer.responses import (
    JSON_TYPE,
    STOPPING_CODE,
    ClientApi,
    ClientExchange,
    ClientGone,
    EngineTimedOut,
    RequestRejected,
    as_rejection,
    data_event,
    encode,
    failure_of,
    outcome_of,
    stopping,
)
from serve_app.serving.gateway.answer.stored import BackgroundWork, StoredResponse
from serve_app.serving.gateway.answer.stream import (
    Announcements,
    Counts,
    QueuedComments,
    QueueForm,
    QueueUpdates,
    StreamScanner,
    counts_of,
    engine_failure,
    stream_outcome,
)
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.body import NO_BODY, HeldBody, body_for
from serve_app.serving.gateway.request.endpoints import ENDPOINTS, OTHER
from serve_app.serving.gateway.request.fields import (
    RECEIPT_HEADER,
    SERVED_MODEL_HEADER,
    dispatch_lines,
    header_lines,
    receipt_comment,
    receipt_line,
    request_id,
    response_headers,
    upstream_head,
)
from serve_app.serving.gateway.upstream import (
    EngineSilentError,
    HeaderList,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)
from serve_app.serving.metric_cells import HistogramCell

logger = logging.getLogger("ray.serve")
R = TypeVar("R")

_EVENT_STREAM = b"text/event-stream"
# Rejections that say nothing about other models: the queue is full or too slow, no replica is ready, the
# context is too short, or the engine failed.
_FALLS_BACK = frozenset(
    {
        Outcome.REJECTED_QUEUE_FULL,
        Outcome.REJECTED_DEADLINE_UNMEETABLE,
        Outcome.REJECTED_NO_REPLICA,
        Outcome.REJECTED_TOO_LONG,
        Outcome.EXPIRED,
        Outcome.FAILED,
    }
)
_NO_COUNTS = Counts()
_logged: set[tuple[str, type[Exception]]] = set()


def observe(call: Callable[..., R], *args: object) -> R | None:
    """Call an observer and return its result, or None if it fails. The first fault of each kind is logged."""
    try:
        return call(*args)
    except Exception as error:
        name = getattr(call, "__qualname__", repr(call))
        if (kind := (name, type(error))) not in _logged:
            _logged.add(kind)
            logger.exception("event=observer_failed observer=%s", name)
        return None


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


class AnswerForm(Struct, frozen=True):
    """The form of an answer, as its client and the settings request it.

    Attributes:
        model: the model's name in the body.
        hide_usage: the client did not request the usage event that ends the stream.
        assembles: the engine streams, but the client requested a non-streamed answer.
        continuable: models whose engines may continue each other's answers (see `Request.assembly`), with the
            longest context of these engines in tokens; None if it is unknown.
        queue_updates: format of queue updates; None if the client does not subscribe.
    """

    model: str = ""
    hide_usage: bool = False
    assembles: bool = False
    continuable: Mapping[str, int | None] = MappingProxyType({})
    queue_updates: QueueForm | None = None


@dataclass(slots=True)
class Attempt:
    """A grant of the scheduler: the permission to send the request to one replica. All times are monotonic.

    Attributes:
        granted_at: arrival of the grant.
        response: the engine's answer; None before it is requested and after its end.
        stream: the last stream of the engine; None without one.
        ended_at: its end in the engine, or its put-back; None before, while it holds capacity.
        failure: why the request was put back; None if it was not.
        outcome: reported outcome; None before, and after a put-back.
        trace_lines: header lines that make the engine's spans part of the request's trace.
    """

    dispatch: Dispatch
    address: ReplicaAddress
    granted_at: float
    response: UpstreamResponse | None = None
    stream: "Stream | None" = None
    ended_at: float | None = None
    failure: UpstreamError | None = None
    outcome: Outcome | None = None
    trace_lines: bytes = b""


class Fallbacks:
    """The further submissions of a request to a route, in the order of their use.

    Args:
        after_s: `RouteSettings.fallback_after_s`.

    Attributes:
        route: name of the route.
        remaining: submissions that have not been used.
        earlier: times of the submissions before the current one, on the clock of the request.
    """

    __slots__ = ("_after_s", "_rejections", "earlier", "remaining", "route")

    def __init__(self, route: str, submissions: Sequence[Submission], after_s: float | None) -> None:
        self.route = route
        self.remaining = list(submissions)
        self.earlier: list[float] = []
        self._after_s = after_s
        self._rejections: list[RequestRejected] = []

    def following(self, rejection: RequestRejected, waited_s: float) -> Submission:
        """Return the next submission after a rejection.

        Args:
            waited_s: time since the arrival of the request.

        Raises:
            RequestRejected: there is none. If every model rejected the request, it is the rejection after
                which a retry is useful first; otherwise that of the first model.
        """
        self._rejections.append(rejection)
        if rejection.outcome not in _FALLS_BACK or not rejection.may_retry:
            raise rejection
        if self.remaining:
            submission = self.remaining.pop(0)
            stated_s = submission.queue_timeout_s
            left_s = None if stated_s is None else stated_s - waited_s
            if left_s is None or left_s > 0:
                submission = replace(submission, queue_timeout_s=left_s)
                return with_limit(submission, self._after_s) if self.remaining else submission
        raise min(self._rejections, key=_retry_after_s)


def with_limit(submission: Submission, after_s: float | None) -> Submission:
    """Return a submission that waits for at most `after_s`; None sets no further limit."""
    stated_s = submission.queue_timeout_s
    if after_s is None or (stated_s is not None and stated_s <= after_s):
        return submission
    return replace(submission, queue_timeout_s=after_s)


def _retry_after_s(rejection: RequestRejected) -> float:
    return math.inf if rejection.retry_after_s is None else rejection.retry_after_s


class RequestObserver(Protocol):
    """Metrics and log of a gateway: `Telemetry`."""

    def on_arrival(self, model: str) -> None:
        """Count a request as in flight; `model` is empty until the body has been read."""
        ...

    def on_departure(self, model: str) -> None:
        """Count a request as no longer in flight."""
        ...

    def on_grant(self, request: "Request") -> None:
        """Record the overhead of a request that has just received the first grant of a model."""
        ...

    def itl_histogram(self, request: "Request") -> HistogramCell:
        """Return the cell that records the inter-token latencies of the request's stream."""
        ...

    def on_put_back(self, request: "Request", failure: DispatchFailure) -> None:
        """Count a granted request that was put back."""
        ...

    def on_fallback(self, request: "Request", fallback: str, reason: Outcome) -> None:
        """Count a request to a route that one model rejected, and that another one receives next."""
        ...

    def on_conclusion(self, request: "Request") -> None:
        """Record a scheduled request that has reached its outcome."""
        ...


class RequestTrace(Protocol):
    """Trace of a sampled request."""

    @property
    def trace_id(self) -> str:
        """Id of the trace, in hexadecimal."""
        ...

    def begin_attempt(self, request: "Request", attempt: Attempt) -> bytes:
        """Begin the span of an attempt, and return its `Attempt.trace_lines`."""
        ...

    def end(self, request: "Request", record: RequestRecord, status: int) -> None:
        """End all spans; `status` is that of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """State shared by all requests of a gateway.

    Attributes:
        schedulers: by served name; the names of one model share its scheduler.
        open: requests that have been submitted and whose answers are incomplete.
        on_end: called after a request has left `open`.
        queue_comment_interval_s: 0 if comments are disabled.
    """

    upstream: UpstreamPool
    observer: RequestObserver
    background: BackgroundWork
    schedulers: Mapping[str, SchedulerClient]
    open: set["Request"]
    on_end: Callable[[], None]
    queue_comment_interval_s: float = 0.0


class Request(ChannelRequest):
    """A request of a client, from its head to its record. All times are monotonic.

    `RequestReader` sets the second group of attributes once the body was read.

    Attributes:
        exchange: the server's side of the request.
        endpoint: how its path is treated.
        headers: headers by name in lower case; of repeated ones the last.
        request_id: the gateway's id, unique among all gateways.
        client_request_id: the client's id, or the gateway's if it sent none.
        arrived_at: its head was read.
        trace: recorder of its stages; None if it is not sampled.

        caller: who sent it; None until it is known.
        submission: what the scheduler knows about it.
        forwarded: client header lines for the engine.
        body: body for the engine, without fields of the grant; released as soon as it cannot be sent again.
        form: what was requested of its answer.
        stored: its response, if its engine will store it; None for other APIs.
        fallbacks: the other models of its route; None if the requested name is not a route's.

        state: see the module.
        submitted_at: it was submitted to the scheduler of its model.
        attempt: last grant; None before the first one of its model.
        attempts: all grants.
        assembly: state of an answer that may be continued, which outlives attempts; None for others.
        has_begun: the client has a part of the answer.
        first_token_at: first bytes of a streamed answer; None for other answers.
        conclusion: its outcome, with a text for the log; None until it is known.
        counts: figures of the engine's answer, set with the conclusion.
    """

    trace: RequestTrace | None = None
    caller: Caller | None = None
    submission: Submission
    forwarded = b""
    body: HeldBody = NO_BODY
    form = AnswerForm()
    stored: StoredResponse | None = None
    fallbacks: Fallbacks | None = None
    state = State.READING
    submitted_at = 0.0
    attempt: Attempt | None = None
    assembly: ContinuableAssembly | None = None
    has_begun = False
    first_token_at: float | None = None
    conclusion: Conclusion | None = None
    counts = _NO_COUNTS
    _engine_failed = False
    _comments: QueuedComments | None = None

    def __init__(self, services: Services, exchange: ClientExchange, own_id: str, arrived_at: float) -> None:
        self.services = services
        self.exchange = exchange
        self.endpoint = ENDPOINTS.get(exchange.path, OTHER)
        self.headers: Mapping[bytes, bytes] = dict(exchange.headers)
        self.request_id = own_id
        self.client_request_id = request_id(self.headers.get(b"x-request-id"), own_id)
        self.arrived_at = arrived_at
        self.attempts: list[Attempt] = []

    def __repr__(self) -> str:
        return f"<Request {self.request_id} {self.state.name.lower()}>"

    # What it asks for, and plain responses.

    @property
    def path(self) -> str:
        """Path at the gateway."""
        return self.exchange.path

    @property
    def api(self) -> ClientApi:
        """API in which it is answered."""
        return self.endpoint.api

    @property
    def scheduler(self) -> SchedulerClient:
        """Client of the scheduler of its model."""
        return self.services.schedulers[self.submission.spec.model]

    @property
    def id_of_client(self) -> str:
        """Id chosen by the client; empty for none."""
        return "" if self.client_request_id == self.request_id else self.client_request_id

    @property
    def engine_method(self) -> str:
        """HTTP method towards the engine. HEAD is sent as GET, because its headers depend on the answer."""
        return "POST" if self.exchange.method == "POST" else "GET"

    @property
    def client(self) -> str:
        """Host of the client; empty for a request from within and for a Unix socket."""
        address = self.exchange.client
        return address[0] if address else ""

    @property
    def id_lines(self) -> bytes:
        """Header lines that return the id of the request."""
        return self.api.id_lines(self.client_request_id)

    def query(self) -> dict[str, list[str]]:
        """Return the parameters of the query."""
        return parse_qs(self.exchange.query.decode("latin-1"))

    def respond(self, status: int, headers: HeaderList, body: bytes, lines: bytes | None = None) -> None:
        """Send a whole response without waiting for the client.

        Args:
            lines: own header lines; None for those with the id of the request.
        """
        length = (b"content-length", b"%d" % len(body))
        self.exchange.start_response(status, [*headers, length], self.id_lines if lines is None else lines)
        self.exchange.write_chunk(body, ends=True)

    def respond_json(self, document: object, status: int = 200) -> None:
        """Send a small document as JSON."""
        self.respond(status, [JSON_TYPE], encode(document))

    async def write(self, piece: bytes, *, ends: bool = False) -> None:
        """Write a piece of a response that has begun, once the client has read those before."""
        await self.exchange.drain()
        self.exchange.write_chunk(piece, ends=ends)

    def reject(self, rejection: RequestRejected, *more: tuple[bytes, bytes]) -> None:
        """Send an error response."""
        headers = [JSON_TYPE, *rejection.headers(), *more]
        self.respond(self.api.status(rejection), headers, self.api.error(rejection))

    async def receive(self) -> bytes:
        """Return the next piece of the body; it is the last one if the exchange's `more_body` is False then.

        Raises:
            ClientGone: the client disconnected before it was complete.
        """
        piece = await self.exchange.receive()
        if piece is None:
            raise ClientGone("the client disconnected before its request was complete")
        return piece

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Cancel the task that serves the request on a disconnect; enter it once the body has been read.

        That cancellation is converted, as `asyncio.timeout` does. Other cancellations pass through.

        Raises:
            ClientGone: on exit, if the client disconnected inside.
        """
        exchange, task, fired = self.exchange, asyncio.current_task(), False
        assert task is not None

        def fire() -> None:
            nonlocal fired
            fired, exchange.on_disconnect = True, None
            task.cancel()

        exchange.on_disconnect = fire
        if exchange.disconnected:
            fire()
        try:
            yield
        except asyncio.CancelledError:
            if fired and task.cancelling() == 1:
                raise ClientGone("the client closed its connection") from None
            raise
        finally:
            exchange.on_disconnect = None
            if fired:
                task.uncancel()

    # From the gateway.

    def submit(self) -> None:
        """Queue the request, whose body has been read. Everything else follows by callbacks."""
        services, exchange = self.services, self.exchange
        services.open.add(self)
        observe(services.observer.on_arrival, self.submission.spec.model)
        exchange.on_disconnect = self._on_disconnect
        try:
            if exchange.disconnected:
                self._on_disconnect()
                return
            if services.queue_comment_interval_s or self.form.queue_updates is not None:
                self._start_comments()
            self._queue(self.submission)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self.on_error(error)

    def end(self, retry_after_s: float) -> None:
        """End the request because the application stops, with an error event if the answer has begun."""
        if self.conclusion is not None:
            return
        if self.has_begun:
            message = "the server stopped during this answer, which is incomplete: send the request again"
            rejection = RequestRejected(Outcome.FAILED, message, code=STOPPING_CODE)
        else:
            rejection = stopping(retry_after_s)
        self._reject(rejection)

    # From the scheduler.

    def on_grant(self, dispatch: Dispatch, address: ReplicaAddress) -> None:
        """Send the request to the granted replica."""
        if self.state is State.ENDED:
            return
        try:
            attempt = Attempt(dispatch, address, monotonic())
            self._accept(attempt)
            self._send(attempt)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self.on_error(error)

    def on_rejection(self, rejection: Conclusion) -> None:
        """End the request, or submit it to the next model of its route."""
        if self.state is not State.ENDED:
            failure = None if self.attempt is None else self.attempt.failure
            self.on_error(as_rejection(rejection, failure))

    def on_revocation(self) -> None:
        """Stop the current attempt, unless the answer is complete or cannot be continued."""
        assembly = self.assembly
        if self.has_begun and not isinstance(assembly, ContinuableStream):
            return
        if self.is_granted and not (assembly is not None and assembly.is_complete):
            self.on_error(UpstreamError(DispatchFailure.REVOKED, "the scheduler revoked the grant"))

    def on_outlook(self, outlook: RequestOutlook | None) -> None:
        """Send the client an update about its place in the queue."""
        if self._comments is not None:
            try:
                self._comments.on_outlook(outlook)
            except Exception as error:  # noqa: BLE001 - a request always ends
                self.on_error(error)

    @property
    def announced(self) -> Announcements | None:
        """Events that begin a stream before its first token, if any."""
        # Clients of background work need its id at once.
        if self.stored is not None and self.stored.is_background:
            return None
        return self.endpoint.announced

    @property
    def is_granted(self) -> bool:
        """True while an attempt holds capacity of its replica."""
        return self.attempt is not None and self.attempt.ended_at is None

    @property
    def seen_tokens(self) -> int:
        """Output tokens seen: about one for each event, and those with which an answer continues."""
        kept = 0 if self.assembly is None else self.assembly.kept_tokens
        stream = None if self.attempt is None else self.attempt.stream
        return kept if stream is None else max(kept, stream.seen_tokens)

    def times(self, now: float) -> RequestTimes:
        """Return the stage times known so far, for receipts; those of the attempt if it is not put back."""
        attempt, earlier = self.attempt, () if self.fallbacks is None else self.fallbacks.earlier
        first_submitted_at = earlier[0] if earlier else self.submitted_at
        granted_at, first_at, ended_at = now, None, None
        if attempt is not None and attempt.failure is None:
            granted_at, first_at, ended_at = attempt.granted_at, self.first_token_at, attempt.ended_at
        return RequestTimes(
            self.path,
            first_submitted_at - self.arrived_at,
            granted_at - self.submitted_at,
            None if first_at is None else first_at - granted_at,
            None if ended_at is None else ended_at - granted_at,
            self.counts.times,
            self.submitted_at - first_submitted_at,
        )

    # The common way.

    def _queue(self, submission: Submission) -> None:
        """Submit the request to the scheduler of a model."""
        self._move(State.QUEUED)
        self.submission = submission
        self.submitted_at = monotonic()
        self.scheduler.submit(self)

    def _accept(self, attempt: Attempt) -> None:
        self._move(State.SENDING)
        is_first, self.attempt = self.attempt is None, attempt
        self.attempts.append(attempt)
        if is_first:
            observe(self.services.observer.on_grant, self)
        if self._comments is not None:
            self._comments.on_grant()
        if self.trace is not None:
            attempt.trace_lines = observe(self.trace.begin_attempt, self, attempt) or b""
        if self.submission.bound_to not in (None, attempt.dispatch.replica_id):
            raise RequestRejected(
                Outcome.REJECTED_NO_REPLICA,
                "this request needs the replica that stores its response, which the scheduler's release does "
                "not support: upgrade the scheduler",
            )

    def _send(self, attempt: Attempt) -> None:
        address = attempt.address
        name = self.stored.name(address) if self.stored is not None else None
        continuation = self._continuation(address) if self.form.continuable else []
        served = self.submission.spec.served_name
        model = served if served != self.form.model else None
        body = body_for(self.body, model, attempt.dispatch.engine_priority, name, continuation)
        forwarded = self.forwarded + attempt.trace_lines
        head = upstream_head(self.engine_method, self.path, self.request_id, forwarded, address, len(body))
        attempt.stream = None
        attempt.response = self.services.upstream.start(address.server, head, body, self._on_head)

    def _on_head(self) -> None:
        """Choose how to forward the answer, once its head has arrived."""
        assert self.attempt is not None
        response = self.attempt.response
        assert response is not None
        try:
            if response.status:
                response.on_change = self._answer(response).on_change
                response.on_change()
            elif response.error is not None:
                self.on_error(response.error)
        except Exception as error:  # noqa: BLE001 - a request always ends
            self.on_error(error)

    def _answer(self, response: UpstreamResponse) -> "Answer":
        is_stream = response.status == 200 and response.header(b"content-type").startswith(_EVENT_STREAM)
        if is_stream:
            if self.form.assembles:
                return AssembledAnswer(self, response)
            if isinstance(self.assembly, ContinuableStream):
                return ContinuedStream(self, response, self.assembly)
            return PassedStream(self, response)
        if response.status in (400, 422) and self.assembly is not None and self.assembly.is_continued:
            raise NotContinuedError("the engine rejected the tokens so far")
        return WholeAnswer(self, response)

    # Parts of the answer.

    def respond_whole(self, status: int, headers: HeaderList, body: bytes) -> None:
        """Send a whole answer, and end the request."""
        if self._begin_answer():
            self.exchange.write_chunk(self.api.body_event(status, body), ends=True)
        else:
            self.respond(status, headers, body, self._lines())
        self._leave()

    def begin_stream(self, response: UpstreamResponse) -> None:
        """Begin a streamed answer, unless an attempt before has."""
        is_continued = self.has_begun
        in_stream = self._begin_answer()
        if not (is_continued or in_stream):
            self.exchange.start_response(200, response_headers(response.headers), self._lines())

    def finish_stream(self, events: bytes) -> None:
        """Send the last events, and end the request."""
        assert self.attempt is not None
        if RECEIPT_HEADER in self.headers:
            events += receipt_comment(self.times(monotonic()), self.attempt.dispatch)
        self.exchange.write_chunk(events, ends=True)
        self._leave()

    def break_stream(self, error: UpstreamError, scanner: StreamScanner) -> bytes:
        """Conclude a stream that failed after its first byte, and return the error event that ends it."""
        self.conclude(Outcome.FAILED, Counts(scanner.usage), str(error))
        message = (
            f"the engine failed during its answer, which is incomplete: send the request again ({error})"
        )
        return self.api.error_event(RequestRejected(Outcome.FAILED, message))

    def conclude_stream(self, scanner: StreamScanner) -> None:
        """Conclude a request whose stream is complete."""
        usage = scanner.usage if self.assembly is None else self.assembly.counted(scanner.usage)
        counts = Counts(usage, scanner.times, scanner.response_id)
        self.conclude(stream_outcome(scanner), counts, scanner.error or "")

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
        if self.fallbacks is not None and self.fallbacks.remaining:
            raise RequestRejected(Outcome.FAILED, str(failure))

    def check_outgrown(self) -> None:
        """Raise `UpstreamError` if an engine with a longer context can continue the answer."""
        assembly, attempt = self.assembly, self.attempt
        if assembly is None or attempt is None:
            return
        if assembly.outgrows(attempt.address.max_model_len):
            raise UpstreamError(DispatchFailure.TOO_LONG, "the answer outgrew the engine's context")

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
        assert self.attempt is not None
        dispatch = self.attempt.dispatch
        lines = self.id_lines + dispatch_lines(dispatch)
        if self.fallbacks is not None:
            served = self.submission.spec.served_name.encode("latin-1", "replace")
            lines += header_lines([(SERVED_MODEL_HEADER, served)])
        if RECEIPT_HEADER in self.headers:
            lines += receipt_line(self.times(monotonic()), dispatch)
        return lines

    # Deviations.

    def _start_comments(self) -> None:
        form = self.form
        if not self.submission.spec.streamed or form.assembles:
            return
        exchange, interval_s = self.exchange, self.services.queue_comment_interval_s
        if form.queue_updates is None:
            self._comments = QueuedComments(exchange, interval_s, self.id_lines)
        else:
            self._comments = QueueUpdates(
                exchange, interval_s, self.id_lines, form.queue_updates, lambda: self.scheduler.watch(self)
            )
        self._comments.start()

    def on_error(self, error: Exception) -> None:
        """Put the request back, submit it to another model, or end it."""
        try:
            match error:
                case _ if self.state is State.ENDED:
                    logger.error("event=gateway_error request_id=%s", self.request_id, exc_info=error)
                case EngineSilentError():
                    self._end_or_fall_back(EngineTimedOut(error))
                case UpstreamError():
                    self._put_back(error)
                case NotContinuedError() if not self.has_begun and self.attempt is not None:
                    self._begin_anew(self.attempt)
                case NotContinuedError():
                    self._reject(RequestRejected(Outcome.FAILED, f"the answer is incomplete: {error}"))
                case RequestRejected():
                    self._end_or_fall_back(error)
                case _:
                    self._fail(error)
        except Exception as further:  # noqa: BLE001 - a request always ends
            self._fail(further)

    def _put_back(self, failure: UpstreamError) -> None:
        attempt = self.attempt
        assert attempt is not None
        self._close_response()
        self._move(State.QUEUED)
        attempt.failure, attempt.ended_at = failure, monotonic()
        observe(self.services.observer.on_put_back, self, failure.failure)
        kept = 0 if self.assembly is None else self.assembly.kept_tokens
        self.scheduler.put_back(self, failure.failure, str(failure), kept, failure.retry_after_s)

    def _begin_anew(self, attempt: Attempt) -> None:
        """Send the request again as a whole, because its engine cannot continue the answer."""
        self._close_response()
        model = self.submission.spec.model
        others = {name: longest for name, longest in self.form.continuable.items() if name != model}
        self.form = replace(self.form, continuable=others)
        self.assembly = None
        self._send(attempt)

    def _continuation(self, address: ReplicaAddress) -> list[bytes]:
        """Return the fields by which an engine continues the answer, or begins one that can be continued.

        Raises:
            NotContinuedError: the engine cannot continue an answer of which the client has a part.
        """
        spec = self.submission.spec
        # Only engines like vLLM have these fields: those that name responses.
        continuable = self.form.continuable
        if not (spec.model in continuable and address.names_responses):
            if self.has_begun:
                raise NotContinuedError("the next engine cannot continue it")
            self.assembly = None
            return []
        if self.assembly is None or not self.assembly.kept_tokens:
            self.assembly = self._new_assembly(spec, continuable[spec.model])
        return self.assembly.begin_attempt()

    def _new_assembly(self, spec: RequestSpec, longest: int | None) -> ContinuableAssembly:
        limit, is_chat = spec.max_output_tokens, spec.shape.messages > 0
        if self.form.assembles:
            return ContinuableAssembly(limit, is_chat=is_chat, longest=longest)
        return ContinuableStream(limit, is_chat=is_chat, longest=longest, hide_usage=self.form.hide_usage)

    def _end_or_fall_back(self, rejection: RequestRejected) -> None:
        fallbacks = self.fallbacks
        if fallbacks is None or self.has_begun:
            self._reject(rejection)
            return
        try:
            following = fallbacks.following(rejection, monotonic() - self.arrived_at)
        except RequestRejected as best:
            self._reject(best)
            return
        fallbacks.earlier.append(self.submitted_at)
        self._fall_back(following, rejection)

    def _fall_back(self, submission: Submission, rejection: RequestRejected) -> None:
        """Submit the request to the next model of its route."""
        observer, following = self.services.observer, submission.spec.model
        self._close_response()
        self._report_end(rejection.outcome)
        observe(observer.on_departure, self.submission.spec.model)
        observe(observer.on_arrival, following)
        observe(observer.on_fallback, self, following, rejection.outcome)
        self.attempt, self.assembly, self._engine_failed = None, None, False
        self._queue(submission)
        if self._comments is not None:
            self._comments.on_fallback()

    # The end.

    def _on_disconnect(self) -> None:
        if self.state is State.ENDED:
            return
        try:
            self._withdraw()
            if not self.continues_in_background:
                stream = None if self.attempt is None else self.attempt.stream
                usage = None if stream is None or self.assembly is not None else stream.scanner.usage
                self.conclude(Outcome.CANCELLED, Counts(usage), "the client closed its connection")
            self._leave()
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._fail(error)

    def _reject(self, rejection: RequestRejected, detail: str | None = None) -> None:
        """End the request with an error: as the response or, if a stream is open, as an event."""
        self._withdraw()
        self.conclude(rejection.outcome, detail=rejection.message if detail is None else detail)
        comments = self._comments
        if comments is not None:
            comments.stop()
        if self.has_begun or (comments is not None and comments.begun):
            event = self.api.error_event(rejection)
            if isinstance(self.assembly, ContinuableStream):
                event = self.assembly.ready() + event
            self.exchange.write_chunk(event, ends=True)
        else:
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
        attempt = self.attempt
        if attempt is None or attempt.response is None:
            return
        if attempt.stream is not None:
            # What a slow client has not read counts.
            attempt.stream.scanner.feed(attempt.response.take())
        attempt.response.close()
        attempt.response = self.exchange.on_writable = None

    def conclude(self, outcome: Outcome, counts: Counts = _NO_COUNTS, detail: str = "") -> None:
        """Set the outcome and release the grant. Later calls change nothing."""
        if self.conclusion is None:
            self.conclusion, self.counts = Conclusion(outcome, detail), counts
            self._report_end(outcome, counts.usage)

    def _report_end(self, outcome: Outcome, usage: Usage | None = None) -> None:
        """Report the end at one model to its scheduler, which releases the grant."""
        now, attempt = monotonic(), self.attempt
        if attempt is not None and attempt.ended_at is None:
            attempt.ended_at, attempt.outcome = now, outcome
            gap_s, gap_ended_at = (0.0, 0.0) if attempt.stream is None else attempt.stream.longest_gap
            gap = DecodeGap(gap_s, now - gap_ended_at) if gap_s else None
            self.scheduler.finish(self, outcome, usage, self.times(now), gap)
        elif self.state is not State.READING:
            self.scheduler.note_end(self, outcome, self.times(now))

    @property
    def continues_in_background(self) -> bool:
        """Whether the engine continues a background response after the client's request has ended."""
        return self.stored is not None and self.stored.is_running and self.is_granted

    def _leave(self) -> None:
        """Enter the last state, and record the request, unless its engine continues in the background."""
        self._close_response()
        self._move(State.ENDED)
        if self._comments is not None:
            self._comments.stop()
        self.body.release()
        self.exchange.on_disconnect = self.exchange.on_writable = None
        self.services.open.discard(self)
        if self.continues_in_background:
            assert self.stored is not None
            assert self.attempt is not None
            self.services.background.follow(
                self.stored.response_id, self.attempt.address, self._on_background_end
            )
        else:
            self._record()
        self.services.on_end()

    def _on_background_end(self, outcome: Outcome, usage: Usage | None, detail: str) -> None:
        assert self.stored is not None
        self.conclude(outcome, Counts(usage, response_id=self.stored.response_id), detail)
        self._record()

    def _record(self) -> None:
        observer = self.services.observer
        observe(observer.on_departure, self.submission.spec.model)
        observe(observer.on_conclusion, self)

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a request cannot be {state.name} after {self.state.name}")
        self.state = state


# -- answers ----------------------------------------------------------------------------------------------


class Answer:
    """Forwarding of the answer of one attempt; the kinds of answers differ in `_advance`."""

    __slots__ = ("_request", "_response")

    def __init__(self, request: Request, response: UpstreamResponse) -> None:
        self._request = request
        self._response = response

    def on_change(self) -> None:
        """Forward what has arrived; an error puts the request back or ends it."""
        try:
            self._advance()
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._request.on_error(error)

    def _advance(self) -> None:
        raise NotImplementedError


class WholeAnswer(Answer):
    """An answer without a stream, forwarded once it is complete, so that a failure can be retried."""

    __slots__ = ("_pieces",)

    def __init__(self, request: Request, response: UpstreamResponse) -> None:
        super().__init__(request, response)
        self._pieces: list[bytes] = []

    def _advance(self) -> None:
        response = self._response
        if response.pieces:
            self._pieces.append(response.take())
        if response.complete:
            self._forward(b"".join(self._pieces))
        elif response.error is not None:
            raise response.error

    def _forward(self, body: bytes) -> None:
        request, response = self._request, self._response
        failure = failure_of(response.status, response.headers, body)
        if failure is not None:
            request.check_retry(failure)
        if request.has_begun:
            raise NotContinuedError(str(failure or f"the engine answered {response.status} without a stream"))
        outcome = outcome_of(response.status)
        counts = _NO_COUNTS
        if outcome is Outcome.COMPLETED:
            counts = counts_of(body)
            if request.stored is not None:
                request.stored.on_answer(body)
        if not request.continues_in_background:
            request.conclude(outcome, counts, str(failure or ""))
        headers = response_headers(response.headers)
        headers, body = request.api.engine_answer(response.status, request.path, headers, body)
        request.respond_whole(response.status, headers, body)


class Stream(Answer):
    """Base of the forwarding of event streams.

    Attributes:
        scanner: its scanner.
        longest_gap: longest gap between two pieces in seconds, or 0, and its end.
    """

    __slots__ = ("_announced", "_gaps", "_last_at", "_unread", "longest_gap", "scanner")

    def __init__(self, request: Request, response: UpstreamResponse, *, hide_usage: bool = False) -> None:
        super().__init__(request, response)
        self.scanner = StreamScanner(hide_usage=hide_usage)
        self.longest_gap = 0.0, 0.0
        assert request.attempt is not None
        request.attempt.stream = self
        self._announced = request.announced
        self._gaps: HistogramCell | None = None
        # The first output, and then each piece; 0 before.
        self._last_at = 0.0
        # Pieces that have arrived and have not been read, because the client does not read.
        self._unread = 0

    @property
    def seen_tokens(self) -> int:
        """Number of events, once there is output: one for each token, and a few that announce and end it."""
        return self.scanner.events if self._last_at else 0

    def _take(self) -> bytes:
        """Return the events that are whole now."""
        self._unread = 0
        events = self.scanner.feed(self._response.take())
        return events + self.scanner.flush() if self._response.complete else events

    def _is_output(self, events: bytes) -> bool:
        """Return whether there are events that do more than announce the answer."""
        return bool(events) and not (self._announced is not None and self._announced.match_all(events))

    def _begin_output(self) -> None:
        """Report the first token."""
        request = self._request
        self._last_at = monotonic()
        request.scheduler.first_token(request)

    def _note_gap(self) -> None:
        """Record the time since the piece before, if another one has arrived."""
        if len(self._response.pieces) == self._unread:
            return
        self._unread, now = len(self._response.pieces), monotonic()
        gap_s, self._last_at = now - self._last_at, now
        if self._gaps is not None:
            observe(self._gaps.observe, gap_s)
        if gap_s > self.longest_gap[0]:
            self.longest_gap = gap_s, now


class PassedStream(Stream):
    """A stream that is passed on as it arrives. Failures can be retried until its first output.

    Some APIs begin every stream with announcements. Passed on at once, they would commit the client to this
    engine before the prefill, and would count as its first token.
    """

    __slots__ = ("_events", "_has_room")

    def __init__(self, request: Request, response: UpstreamResponse) -> None:
        super().__init__(request, response, hide_usage=request.form.hide_usage)
        self._events = b""
        self._has_room = True

    def _advance(self) -> None:
        if not self._last_at:
            self._await_output()
            return
        self._note_gap()
        if self._response.has_ended:
            self._end(self._take())
        elif self._has_room:
            self._pass_on()

    def _await_output(self) -> None:
        events = self._events = self._events + self._take()
        if self._response.complete or self._is_output(events):
            self._begin(events)
        elif self._response.error is not None:
            raise self._response.error

    def _begin(self, events: bytes) -> None:
        request, response, scanner = self._request, self._response, self.scanner
        if scanner.error is not None and scanner.is_engine_error:
            request.check_retry(engine_failure(scanner))
        if request.stored is not None:
            request.stored.on_first_events(events)
        self._begin_output()
        request.first_token_at = self._last_at
        request.begin_stream(response)
        if response.has_ended:
            self._end(events)
            return
        self._gaps = observe(request.services.observer.itl_histogram, request)
        request.exchange.on_writable = self._on_writable
        self._has_room = request.exchange.write_chunk(events)

    def _pass_on(self) -> None:
        if events := self._take():
            self._has_room = self._request.exchange.write_chunk(events)

    def _on_writable(self) -> None:
        self._has_room = True
        response = self._response
        if response.has_ended or not response.pieces:
            return
        try:
            self._pass_on()
        except Exception as error:  # noqa: BLE001 - a request always ends
            self._request.on_error(error)

    def _end(self, events: bytes) -> None:
        request, response = self._request, self._response
        if response.error is not None:
            events += request.break_stream(response.error, self.scanner)
        else:
            request.conclude_stream(self.scanner)
        request.finish_stream(events)


class AssembledAnswer(Stream):
    """A stream of which the client receives one JSON object. Failures can be retried until its end."""

    __slots__ = ("_assembly",)

    def __init__(self, request: Request, response: UpstreamResponse) -> None:
        super().__init__(request, response)
        self._assembly = request.assembly or AnswerAssembly()

    def _advance(self) -> None:
        response = self._response
        events = self._take()
        self._assembly.feed(events)
        if not self._last_at and (response.complete or self._is_output(events)):
            self._begin_output()
        if response.complete:
            self._end()
        elif response.error is not None:
            raise response.error

    def _end(self) -> None:
        scanner, request = self.scanner, self._request
        status, body = 200, self._assembly.error
        if body is None:
            request.check_outgrown()
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


class ContinuedStream(Stream):
    """A stream, or its rest, that another engine can continue. Failures can be retried until its end."""

    __slots__ = ("_stream",)

    def __init__(self, request: Request, response: UpstreamResponse, stream: ContinuableStream) -> None:
        super().__init__(request, response)
        self._stream = stream
        self._gaps = observe(request.services.observer.itl_histogram, request)

    def _advance(self) -> None:
        """Pass on the events that have arrived, as soon as the client reads."""
        response, exchange = self._response, self._request.exchange
        if self._last_at:
            self._note_gap()
        if exchange.is_choked and not response.has_ended:
            exchange.on_writable = self.on_change
            return
        events = self._take()
        self._stream.feed(events)
        if not self._last_at:
            if not (response.complete or self._is_output(events)):
                if response.error is not None:
                    raise response.error
                return
            self._begin_output()
        if response.complete or self.scanner.error is not None:
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
        request, scanner = self._request, self.scanner
        if scanner.error is None:
            request.check_outgrown()
            events = self._stream.end()
            request.conclude_stream(scanner)
        elif scanner.is_engine_error:
            failure = engine_failure(scanner)
            request.check_retry(failure)
            events = self._stream.ready() + request.break_stream(failure, scanner)
        else:
            events = self._stream.ready() + data_event(self._stream.error or b"")
            request.conclude_stream(scanner)
        self._begin()
        request.finish_stream(events)
