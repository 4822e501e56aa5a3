"""Life of one scheduled request, from its submission to exactly one conclusion.

Rules:
- Each grant ends with exactly one call of `finish` or `put_back`, on every path, including cancellation of
  the serving task. `_open_grant` is the grant that has not ended.
- The client receives only comments before the first bytes of an answer that is meant for it. Until then a
  failure of a replica puts the request back into its queue, invisibly to the client.
- A timeout is final: the engine may still be computing, and the next one would take as long.
- An engine's own error is retried once on another replica. A second one is passed to the client, because the
  request is the likely cause.
- A request to a route that is rejected by one model is submitted to the next one (`routes.Fallbacks`), also
  invisibly to the client.
- After the first byte, a failure ends the stream with an error event, unless another engine continues it
  (`continuation`). Nothing is sent twice, and no stream ends without a final event or an error.
- Capacity is released when the engine has finished, not when a slow client has read the answer.
- The scheduler may revoke the grant of a revocable request, unless its answer has begun and cannot be
  continued. The engine is stopped, and the request is put back. The next engine continues what this one has
  generated, if that is possible, also after a failure of the replica.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.request import Submission, Usage
from serve_app.serving.channel.scheduler_client import Grant, RequestOutlook, SchedulerClient
from serve_app.serving.gateway.answer.client import ClientGone
from serve_app.serving.gateway.answer.client_api import send_rejection
from serve_app.serving.gateway.answer.continuation import (
    ContinuableAssembly,
    ContinuableStream,
    NotContinuedError,
)
from serve_app.serving.gateway.answer.engine_answer import failure_of, outcome_of
from serve_app.serving.gateway.answer.responses import (
    JSON_TYPE,
    STOPPING_CODE,
    EngineTimedOut,
    HeaderList,
    RequestRejected,
    as_rejection,
    send_body,
    stopping,
)
from serve_app.serving.gateway.answer.stream import (
    AnswerAssembly,
    StreamPassing,
    StreamScanner,
    counts_of,
    engine_failure,
    first_events,
    next_events,
    stream_outcome,
)
from serve_app.serving.gateway.answer.waiting import QueuedComments, QueueSubscription, QueueUpdates
from serve_app.serving.gateway.request.headers import (
    RECEIPT_HEADER,
    SERVED_MODEL_HEADER,
    dispatch_headers,
    response_headers,
    upstream_head,
)
from serve_app.serving.gateway.request.incoming import ForwardJob
from serve_app.serving.gateway.request_log import ConcludedRequest
from serve_app.serving.gateway.routes import Fallbacks
from serve_app.serving.gateway.stored import BackgroundWork, EngineResponse, ResponseHolders
from serve_app.serving.gateway.telemetry import RequestTimestamps, Telemetry
from serve_app.serving.gateway.upstream import (
    EngineSilentError,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)

logger = logging.getLogger("ray.serve")

_EVENT_STREAM = b"text/event-stream"


@dataclass(frozen=True, slots=True)
class Services:
    """State shared by all requests of a gateway; `queue_comment_interval_s` is 0 if comments are disabled."""

    upstream: UpstreamPool
    telemetry: Telemetry
    holders: ResponseHolders
    background: BackgroundWork
    queue_comment_interval_s: float = 0.0


class ScheduledCall:
    """One job in execution. Single use: `await ScheduledCall(...).run()`."""

    __slots__ = (
        "_assembly",
        "_attempts",
        "_comments",
        "_continues",
        "_deadline",
        "_detail",
        "_engine_failed",
        "_fallbacks",
        "_grant",
        "_job",
        "_on_outlook",
        "_open_grant",
        "_outcome",
        "_revoked",
        "_scheduler",
        "_schedulers",
        "_send",
        "_services",
        "_started",
        "_stored",
        "_streams",
        "_submission",
        "_times",
        "_trace",
        "_usage",
        "_watch",
    )

    def __init__(
        self, job: ForwardJob, services: Services, schedulers: Mapping[str, SchedulerClient]
    ) -> None:
        self._job = job
        self._services = services
        self._schedulers = schedulers
        self._submission = job.submission
        self._scheduler = schedulers[job.submission.spec.model]
        self._fallbacks = Fallbacks(job.fallbacks, job.fallback_after_s) if job.fallbacks else None
        self._on_outlook: Callable[[RequestOutlook | None], None] | None = None
        self._send = job.incoming.send
        self._trace = job.incoming.trace
        self._watch = job.incoming.watch()
        self._times = RequestTimestamps(job.incoming.arrived_at)
        self._open_grant: Grant | None = None
        self._grant: Grant | None = None
        self._attempts = 0
        # Whether the current grant is revoked, and the time limit of its attempt, by which it is stopped.
        self._revoked = False
        self._deadline: asyncio.Timeout | None = None
        # Whether the answer may be continued, and its state, which outlives attempts.
        self._continues = self._submission.spec.model in job.continuable
        self._assembly: ContinuableAssembly | None = None
        self._comments: QueuedComments | None = None
        self._engine_failed = False
        self._started = False
        self._streams = False
        self._outcome: Outcome | None = None
        self._usage: Usage | None = None
        self._detail = ""
        self._stored = None if job.response is None else EngineResponse(job.response, services.holders)

    async def run(self) -> None:
        """Queue, forward, answer and conclude the request. Raises only the cancellation of its task."""
        self._services.telemetry.on_arrival(self._submission.spec.model)
        try:
            self._start_comments()
            with self._watch:
                await self._serve()
        except RequestRejected as rejection:
            self._conclude(rejection.outcome, detail=rejection.message)
            await self._answer(rejection)
        except ClientGone as gone:
            if not self._continues_in_background():
                self._conclude(Outcome.CANCELLED, detail=str(gone))
        except asyncio.CancelledError:
            self._conclude(Outcome.CANCELLED, detail="the server ended the request")
            raise
        except Exception as error:
            logger.exception("event=gateway_error request_id=%s", self._submission.request_id)
            self._conclude(Outcome.FAILED, detail=repr(error))
            await self._answer(
                RequestRejected(Outcome.FAILED, "internal error of the gateway; see its log", status=500)
            )
        finally:
            if self._comments is not None:
                self._comments.cancel()
            self._job.body.release()
            if self._continues_in_background():
                self._follow_background_response()
            else:
                self._record_departure()

    def _record_departure(self) -> None:
        telemetry = self._services.telemetry
        telemetry.on_departure(self._submission.spec.model)
        telemetry.on_conclusion(self._conclusion_record())

    def _continues_in_background(self) -> bool:
        """Return whether the engine continues a background response after the client's request has ended."""
        return self._open_grant is not None and self._stored is not None and self._stored.is_running

    def _follow_background_response(self) -> None:
        assert self._open_grant is not None
        assert self._stored is not None

        def on_end(outcome: Outcome, usage: Usage | None, detail: str) -> None:
            self._conclude(outcome, usage, detail=detail)
            self._record_departure()

        self._services.background.follow(self._stored.response_id, self._open_grant.address, on_end)

    def end(self, retry_after_s: float) -> None:
        """End the request because the application stops, with an error event if the answer has begun.

        Once only the last piece of the answer remains to be sent, the request ends by itself.
        """
        if self._outcome is not None:
            return
        if self._started:
            message = "the server stopped during this answer, which is incomplete: send the request again"
            rejection = RequestRejected(Outcome.FAILED, message, code=STOPPING_CODE)
        else:
            rejection = stopping(retry_after_s)
        self._watch.fire(rejection)

    async def _serve(self) -> None:
        """Serve the request by its model or, if that rejects it, by the first fallback that does not."""
        while True:
            try:
                await self._serve_by_model()
            except RequestRejected as rejection:
                if self._fallbacks is None or self._started:
                    raise
                waited_s = monotonic() - self._job.incoming.arrived_at
                self._fall_back(self._fallbacks.following(rejection, waited_s), rejection)
            else:
                return

    def _fall_back(self, submission: Submission, rejection: RequestRejected) -> None:
        telemetry, before = self._services.telemetry, self._submission.spec.model
        self._report_end(rejection.outcome)
        telemetry.on_departure(before)
        self._submission, self._scheduler = submission, self._schedulers[submission.spec.model]
        telemetry.on_arrival(submission.spec.model)
        telemetry.on_fallback(self._job.route, before, submission.spec.model, rejection.outcome)
        self._grant, self._times.granted_at, self._engine_failed = None, None, False
        self._assembly, self._continues = None, submission.spec.model in self._job.continuable
        if self._on_outlook is not None:
            # After the submission, which the next step sends.
            loop = asyncio.get_running_loop()
            loop.call_soon(self._scheduler.watch, submission.request_id, self._on_outlook)

    async def _serve_by_model(self) -> None:
        submission, telemetry = self._submission, self._services.telemetry
        self._trace.queued(submission)
        self._times.submitted_at = submitted_at = monotonic()
        on_revoke = self._revoke if submission.revocable else None
        answer = await self._scheduler.acquire(submission, self._job.incoming.id_of_client, on_revoke)
        if isinstance(answer, Grant):
            received_at = self._job.body.received_at if submission is self._job.submission else None
            telemetry.on_grant(answer.dispatch, submission.spec.model, received_at, submitted_at)
        failure: UpstreamError | None = None
        while isinstance(answer, Grant):
            self._accept(answer)
            try:
                await self._attempt_until_revoked(answer)
            except EngineSilentError as error:
                raise EngineTimedOut(f"the engine did not answer in time: {error}") from error
            except UpstreamError as error:
                failure = error
            else:
                return
            telemetry.put_back(submission.spec.model, failure.failure)
            self._trace.put_back(failure.failure)
            # From here the scheduler client is responsible for the request, also if this task is cancelled.
            self._open_grant, self._revoked = None, False
            answer = await self._scheduler.put_back(
                submission.request_id,
                answer.dispatch.replica_id,
                failure.failure,
                str(failure),
                0 if self._assembly is None else self._assembly.kept_tokens,
            )
        raise as_rejection(answer, failure)

    def _accept(self, grant: Grant) -> None:
        self._open_grant = self._grant = grant
        bound_to = self._submission.bound_to
        if bound_to not in (None, grant.dispatch.replica_id):
            raise RequestRejected(
                Outcome.REJECTED_NO_REPLICA,
                "this request needs the replica that stores its response, which the scheduler's release does "
                "not support: upgrade the scheduler",
            )
        self._times.granted_at = monotonic()
        self._attempts += 1
        if self._comments is not None:
            self._comments.on_grant()
        self._trace.granted(grant, self._attempts)

    def _revoke(self) -> None:
        """Stop the attempt of the current grant, unless the answer is complete or cannot be continued."""
        has_begun = self._started and not isinstance(self._assembly, ContinuableStream)
        if self._revoked or has_begun or (self._assembly is not None and self._assembly.is_complete):
            return
        self._revoked = True
        if self._deadline is not None:
            self._deadline.reschedule(0)

    async def _attempt_until_revoked(self, grant: Grant) -> None:
        """Attempt the request, and stop when the grant is revoked.

        Raises:
            UpstreamError: the replica failed or the grant was revoked, and the client has received nothing.
        """
        if not self._submission.revocable:
            await self._attempt(grant)
            return
        # The grant may have been revoked before this task has run.
        deadline = asyncio.timeout(0 if self._revoked else None)
        try:
            async with deadline as self._deadline:
                try:
                    await self._attempt(grant)
                except NotContinuedError as error:
                    if self._started:
                        raise RequestRejected(Outcome.FAILED, f"the answer is incomplete: {error}") from error
                    self._assembly, self._continues = None, False
                    await self._attempt(grant)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise UpstreamError(DispatchFailure.REVOKED, "the scheduler revoked the grant") from error
        finally:
            self._deadline = None

    async def _attempt(self, grant: Grant) -> None:
        """Send the request to one replica and its answer to the client.

        Raises:
            UpstreamError: the replica failed, and the client has received nothing from it.
            NotContinuedError: the replica's engine did not continue the answer.
        """
        response = await self._send_to(grant)
        try:
            is_stream = response.status == 200 and response.header(b"content-type").startswith(_EVENT_STREAM)
            if is_stream and self._job.assembles:
                await self._forward_assembled(response, grant)
            elif is_stream and isinstance(self._assembly, ContinuableStream):
                await self._forward_continuable(response, grant, self._assembly)
            elif is_stream:
                await self._forward_stream(response, grant)
            elif response.status in (400, 422) and self._is_continued:
                raise NotContinuedError("the engine rejected the tokens so far")
            else:
                await self._forward_non_streamed(response)
        finally:
            response.close()

    async def _send_to(self, grant: Grant) -> UpstreamResponse:
        """Send the request, without retaining its body, so that the job may release it."""
        address = grant.address
        name = self._stored.name(address) if self._stored is not None else None
        body = self._job.body_for(self._submission, grant, name, self._continuation(grant))
        forwarded = self._job.forwarded + self._trace.headers()
        head = upstream_head(self._job.incoming, forwarded, address, len(body))
        return await self._services.upstream.send(address.server, head, body)

    def _continuation(self, grant: Grant) -> list[bytes]:
        """Return the fields by which an engine continues the answer, or begins one that can be continued.

        Raises:
            NotContinuedError: the engine cannot continue an answer of which the client has a part.
        """
        # Only vLLM has these fields, and it is also the only engine that names responses.
        if not (self._continues and grant.address.names_responses):
            if self._started:
                raise NotContinuedError("the next engine cannot continue it")
            self._assembly = None
            return []
        if self._assembly is None or not self._assembly.kept_tokens:
            spec, job = self._submission.spec, self._job
            longest = job.continuable[spec.model]
            limit, is_chat = spec.max_output_tokens, spec.shape.messages > 0
            self._assembly = (
                ContinuableAssembly(limit, is_chat=is_chat, longest=longest)
                if job.assembles
                else ContinuableStream(limit, is_chat=is_chat, longest=longest, hide_usage=job.hide_usage)
            )
        return self._assembly.begin_attempt()

    @property
    def _is_continued(self) -> bool:
        return self._assembly is not None and self._assembly.is_continued

    async def _forward_non_streamed(self, response: UpstreamResponse) -> None:
        """Forward a non-streamed answer. It is read completely first, so that a failure can be retried.

        Raises:
            NotContinuedError: the client has a part of a stream.
        """
        body = await response.read()
        failure = failure_of(response.status, response.headers, body)
        if failure is not None:
            self._check_retry(failure)
        if self._started:
            raise NotContinuedError(str(failure or f"the engine answered {response.status} without a stream"))
        outcome = outcome_of(response.status)
        usage, self._times.engine = counts_of(body) if outcome is Outcome.COMPLETED else (None, None)
        if self._stored is not None and outcome is Outcome.COMPLETED:
            self._stored.on_answer(body)
        if not self._continues_in_background():
            self._conclude(outcome, usage, detail=str(failure or ""))
        self._begin_answer()
        path, api = self._job.incoming.path, self._job.incoming.api
        headers, body = api.engine_answer(response.status, path, self._headers(response), body)
        if await self._stop_comments():
            event = api.body_event(response.status, body)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await send_body(self._send, response.status, headers, body)

    async def _forward_assembled(self, response: UpstreamResponse, grant: Grant) -> None:
        """Forward a stream as a non-streamed answer. Failures can be retried until the end of the stream."""
        scanner, assembly = StreamScanner(hide_usage=False), self._assembly or AnswerAssembly()
        assembly.feed(await next_events(response, scanner))
        self._scheduler.first_token(self._submission.request_id)
        while not response.at_end:
            assembly.feed(await next_events(response, scanner))
        status, body = 200, assembly.error
        if body is None:
            self._check_outgrown(grant)
            body = assembly.whole()
        elif scanner.is_engine_error:
            self._check_retry(engine_failure(scanner))
            status = 500
        else:
            status = 400
        self._conclude_stream(scanner)
        self._begin_answer()
        headers = [pair for pair in self._headers(response) if pair[0] != b"content-type"]
        await send_body(self._send, status, [JSON_TYPE, *headers], body)

    async def _forward_continuable(
        self, response: UpstreamResponse, grant: Grant, stream: ContinuableStream
    ) -> None:
        """Forward a stream, or the rest of one. Failures can be retried until its end."""
        scanner = StreamScanner(hide_usage=False)
        stream.feed(await next_events(response, scanner))
        self._scheduler.first_token(self._submission.request_id)
        itl, last_at = self._services.telemetry.itl_histogram(self._submission, grant.dispatch), monotonic()
        while not response.at_end and scanner.error is None:
            if events := stream.ready():
                # A revocation may stop the send, so the events remain ready until it has returned.
                await self._send_events(response, events)
                stream.drop_ready()
            stream.feed(await next_events(response, scanner))
            itl.observe(monotonic() - last_at)
            last_at = monotonic()
        if scanner.error is None:
            self._check_outgrown(grant)
            events = stream.end()
            self._conclude_stream(scanner)
        else:
            failure = engine_failure(scanner)
            if scanner.is_engine_error:
                self._check_retry(failure)
            events = stream.ready() + self._end_broken_stream(failure, scanner)
        if self._wants_receipt:
            events += self._times.receipt_comment(grant.dispatch)
        await self._send_events(response, events, is_last=True)

    def _check_outgrown(self, grant: Grant) -> None:
        """Raise `UpstreamError` if an engine with a longer context can continue the answer."""
        if self._assembly is not None and self._assembly.outgrows(grant.address.max_model_len):
            raise UpstreamError(DispatchFailure.TOO_LONG, "the answer outgrew the engine's context")

    async def _send_events(self, response: UpstreamResponse, events: bytes, *, is_last: bool = False) -> None:
        """Send events of a continuable stream, after its head if it has not begun."""
        if not self._started:
            self._times.first_token_at = monotonic()
            if not await self._stop_comments():
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": self._headers(response)}
                )
            self._started = True
        self._streams = not is_last
        await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})

    async def _forward_stream(self, response: UpstreamResponse, grant: Grant) -> None:
        scanner = StreamScanner(hide_usage=self._job.hide_usage)
        events = await first_events(response, scanner, self._job.announced)
        if scanner.error is not None and scanner.is_engine_error:
            self._check_retry(engine_failure(scanner))
        if self._stored is not None:
            self._stored.on_first_events(events)
        self._begin_answer()
        self._times.first_token_at = monotonic()
        self._scheduler.first_token(self._submission.request_id)
        client = self._send
        if not await self._stop_comments():
            await client({"type": "http.response.start", "status": 200, "headers": self._headers(response)})
        self._streams = True
        if not response.at_end:
            itl = self._services.telemetry.itl_histogram(self._submission, grant.dispatch)
            events = await StreamPassing(response, scanner, client.exchange, itl).run(events)
        if response.error is not None:
            events += self._end_broken_stream(response.error, scanner)
        else:
            self._conclude_stream(scanner)
        if self._wants_receipt:
            events += self._times.receipt_comment(grant.dispatch)
        self._streams = False
        await client({"type": "http.response.body", "body": events, "more_body": False})

    def _check_retry(self, failure: UpstreamError) -> None:
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

    def _start_comments(self) -> None:
        job, interval_s = self._job, self._services.queue_comment_interval_s
        if not job.submission.spec.streamed or job.assembles or not (interval_s or job.queue_form):
            return
        headers = job.incoming.id_headers
        if job.queue_form is None:
            self._comments = QueuedComments(self._send, interval_s, headers)
        else:
            subscription = QueueSubscription(job.queue_form, self._watch_queue)
            self._comments = QueueUpdates(self._send, interval_s, headers, subscription)
        self._comments.start()

    def _watch_queue(self, on_outlook: Callable[[RequestOutlook | None], None]) -> None:
        self._on_outlook = on_outlook
        self._scheduler.watch(self._submission.request_id, on_outlook)

    async def _stop_comments(self) -> bool:
        """Stop the comments, and return whether one of them has begun the answer as a stream."""
        if self._comments is None:
            return False
        await self._comments.stop()
        return self._comments.begun

    def _begin_answer(self) -> None:
        """Mark the answer as begun; the request can no longer be retried."""
        self._started = True
        if self._deadline is not None:
            self._deadline.reschedule(None)
        self._job.body.release()

    def _end_broken_stream(self, error: UpstreamError, scanner: StreamScanner) -> bytes:
        """Conclude a stream that failed after its first byte, and return the error event that ends it."""
        self._conclude(Outcome.FAILED, scanner.usage, detail=str(error))
        message = (
            f"the engine failed during its answer, which is incomplete: send the request again ({error})"
        )
        return self._job.incoming.api.error_event(RequestRejected(Outcome.FAILED, message))

    @property
    def _wants_receipt(self) -> bool:
        return RECEIPT_HEADER in self._job.incoming.headers

    def _headers(self, response: UpstreamResponse) -> HeaderList:
        assert self._grant is not None
        own = self._job.incoming.id_headers
        dispatch = self._grant.dispatch
        receipt = self._times.receipt_header(dispatch) if self._wants_receipt else []
        if self._job.route:
            served = self._submission.spec.served_name
            own = [*own, (SERVED_MODEL_HEADER, served.encode("latin-1", "replace"))]
        return [*response_headers(response.headers), *own, *dispatch_headers(dispatch), *receipt]

    async def _answer(self, rejection: RequestRejected) -> None:
        """Send an error to the client: in its open stream or, if nothing was sent, as the response."""
        if await self._stop_comments() and not self._started:
            self._started = self._streams = True
        if self._streams:
            self._streams = False
            await self._end_stream(rejection)
        if self._started:
            return
        self._started = True
        waited_s = monotonic() - self._job.incoming.arrived_at
        incoming = self._job.incoming
        headers = [*incoming.id_headers, (b"x-queue-wait-ms", b"%.1f" % (waited_s * 1000))]
        await send_rejection(incoming.api, self._send, rejection, headers)

    async def _end_stream(self, rejection: RequestRejected) -> None:
        event = self._job.incoming.api.error_event(rejection)
        if isinstance(self._assembly, ContinuableStream):
            event = self._assembly.ready() + event
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    def _conclude(self, outcome: Outcome, usage: Usage | None = None, detail: str = "") -> None:
        """Set the outcome and release the grant; only the first call sets the outcome."""
        is_first = self._outcome is None
        if is_first:
            self._outcome, self._usage, self._detail = outcome, usage, detail
        if is_first or self._open_grant is not None:
            self._report_end(outcome, usage)

    def _report_end(self, outcome: Outcome, usage: Usage | None = None) -> None:
        """Report the end at one model to its scheduler, which releases the grant."""
        grant, self._open_grant = self._open_grant, None
        incoming, now = self._job.incoming, monotonic()
        if grant is not None:
            self._trace.forwarded(outcome)
            times = self._times.finished(incoming.path, now, granted=True)
            self._scheduler.finish(grant.dispatch.request_id, outcome, usage, times)
        else:
            times = self._times.finished(incoming.path, now, granted=False)
            self._scheduler.note_end(incoming.request_id, outcome, times)

    def _conclude_stream(self, scanner: StreamScanner) -> None:
        self._times.engine = scanner.times
        usage = scanner.usage if self._assembly is None else self._assembly.counted(scanner.usage)
        self._conclude(stream_outcome(scanner), usage, detail=scanner.error or "")

    def _conclusion_record(self) -> ConcludedRequest:
        incoming, submission, usage = self._job.incoming, self._submission, self._usage
        dispatch = self._grant.dispatch if self._grant is not None else None
        return ConcludedRequest(
            request_id=submission.request_id,
            arrived_at=incoming.arrived_at,
            dispatched_at=self._times.granted_at,
            first_token_at=self._times.first_token_at,
            finished_at=monotonic(),
            outcome=self._outcome or Outcome.FAILED,
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
            route=self._job.route,
            incoming=incoming,
            endpoint=incoming.path,
            key_id=submission.key.key_id if submission.key is not None else "",
            attempts=self._attempts,
            status=self._send.status,
        )
