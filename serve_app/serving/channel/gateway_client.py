"""The gateway's end of the control channel: holds its requests and obtains grants from the scheduler.

`GatewayClient` is the authority on its gateway's requests; `gateway_sessions` describes the protocol. A
request is pending from `submit` until `finish`, a rejection or its cancellation. It waits or runs by its last
grant. Without a scheduler, waiting requests stay queued, running ones continue, those that may not wait are
rejected, and queue timeouts are enforced here.
"""

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from serve_app.core.events import Cancelled, DispatchFailure, Finished, FirstToken
from serve_app.errors import ChannelError, Conclusion, Outcome
from serve_app.request import DecodeGap, PriorityClass, RequestTimes, Submission, Usage
from serve_app.serving.channel.connector import Connector, Locate
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import (
    Exposition,
    GatewayPage,
    Granted,
    Outlooks,
    PageRequest,
    PutBack,
    Query,
    QueryResult,
    Rejected,
    ReplicaTable,
    Revoked,
    Role,
    Running,
    Scrape,
    SnapshotEnd,
    Submit,
    Watch,
    Welcome,
)
from serve_app.serving.channel.scheduler_client import ChannelRequest, ReplicaAddress
from serve_app.serving.channel.settings import ChannelSettings

# `Retry-After` while a scheduler is being replaced, which takes a few seconds.
DISCONNECTED_RETRY_AFTER_S = 2.0
NO_WAIT_REJECTED = "the scheduler is disconnected, and the request must not wait"

logger = logging.getLogger("ray.serve")

_SCRAPE_TIMEOUT_S = 1.0
_CLOSING_MESSAGE = "this gateway is shutting down"
# Replicas that are missing from the table for longer are gone; a reconnect takes one or two seconds.
_DEPARTED_RETENTION_S = 10.0
# A connected scheduler enforces queue timeouts itself; one that is this late is faulty.
_EXPIRY_GRACE_S = 5.0
# Queue timeout of requests without their own, until a scheduler has sent the defaults.
_DEFAULT_QUEUE_TIMEOUT_S = 60.0


class PendingRequest:
    """A request that the client holds, and its grants.

    Attributes:
        queued_at: its submission, on the loop's clock.
        timed_since: start of its queue timeout: its submission, or a put-back after it was served in part.
        grants: number of grants received.
        replica_id: replica of its grant; None while it waits.
        started: its answer has begun, as the scheduler knows.
        put_back: end of its last grant; None before the first one, and while it runs.
        watches_queue: it receives outlooks while it waits.
    """

    __slots__ = (
        "grants",
        "put_back",
        "queued_at",
        "replica_id",
        "request",
        "started",
        "timed_since",
        "watches_queue",
    )

    def __init__(self, request: ChannelRequest, now: float) -> None:
        self.request = request
        self.queued_at = self.timed_since = now
        self.grants = 0
        self.replica_id: str | None = None
        self.started = False
        self.put_back: PutBack | None = None
        self.watches_queue = False

    def snapshot(self, now: float) -> Submit | Running:
        """Return the request's entry in a snapshot."""
        age_s, replica_id, request = now - self.queued_at, self.replica_id, self.request
        submission, client_id = request.submission, request.id_of_client
        if replica_id is None:
            return Submit(submission, age_s, self.grants, self.put_back, client_id)
        return Running(submission, age_s, self.grants, replica_id, self.started, client_id)


def disconnected_rejection(message: str) -> Conclusion:
    """Return the rejection while no scheduler is connected."""
    return Conclusion(Outcome.REJECTED_NO_REPLICA, message, DISCONNECTED_RETRY_AFTER_S)


def rejection_without_scheduler(submission: Submission, pending: int, limit: int) -> Conclusion | None:
    """Return the rejection, without a scheduler, of no-wait requests and those over the limit; else None."""
    if submission.no_wait:
        return disconnected_rejection(NO_WAIT_REJECTED)
    if pending < limit:
        return None
    message = (
        f"the scheduler is disconnected, and this gateway has {pending:,} requests, of at most {limit:,}: "
        "retry after the delay in Retry-After"
    )
    return Conclusion(Outcome.REJECTED_QUEUE_FULL, message, DISCONNECTED_RETRY_AFTER_S)


class _PendingQuery:
    """A pending query and the parts of its answer."""

    def __init__(self, answer: asyncio.Future[bytes]) -> None:
        self.answer = answer
        self._parts: list[bytes] = []

    def add_part(self, message: QueryResult) -> None:
        self._parts.append(message.part)
        if message.error:
            self.fail(message.error)
        elif message.is_last and not self.answer.done():
            self.answer.set_result(b"".join(self._parts))

    def fail(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ChannelError(reason))


class GatewayClient:
    """Client of one model's scheduler in a gateway; implements `SchedulerClient`.

    Args:
        gateway_id: unique per process start; a second connection with the same id replaces the first.
        locate: finds the scheduler; in production a call on a Ray handle.
    """

    def __init__(self, gateway_id: str, locate: Locate, settings: ChannelSettings) -> None:
        self._gateway_id = gateway_id
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._connector = Connector(Role.GATEWAY, gateway_id, locate, settings, self)
        self._link: Link | None = None
        self._pending: dict[str, PendingRequest] = {}
        # Each with the number of its message; 0 if it could not be sent.
        self._unacknowledged_finishes: deque[tuple[int, Finished]] = deque()
        self._table: dict[str, ReplicaAddress] = {}
        self._departed: dict[str, tuple[ReplicaAddress, float]] = {}
        self._adapters: Mapping[str, frozenset[str]] = {}
        self._open_replicas: tuple[ReplicaAddress, ...] = ()
        self._queue_timeouts_s: dict[PriorityClass, float] = {}
        self._scrapes: dict[int, asyncio.Future[str]] = {}
        # Metrics of other gateways, until the last part of a scrape's answer arrives.
        self._other_metrics: dict[int, list[str]] = {}
        self._scrape_serial = 0
        self._queries: dict[int, _PendingQuery] = {}
        self._query_serial = 0
        self._render_metrics: Callable[[], Awaitable[str]] | None = None
        self._render_tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        waiting = sum(entry.replica_id is None for entry in self._pending.values())
        return (
            f"<GatewayClient {self._gateway_id} waiting {waiting}, running {len(self._pending) - waiting}, "
            f"{'connected' if self._link else 'disconnected'}>"
        )

    @property
    def is_connected(self) -> bool:
        """True if a scheduler is connected."""
        return self._link is not None

    @property
    def incarnation(self) -> int:
        """Highest incarnation of the scheduler met so far; 0 before the first."""
        return self._connector.highest_incarnation

    def start(self) -> None:
        """Start connecting to the scheduler."""
        self._connector.start()

    async def close(self) -> None:
        """Reject waiting requests, send `Bye` and stop; the scheduler releases running ones."""
        self._closed = True
        for entry in list(self._pending.values()):
            self._reject(entry, disconnected_rejection(_CLOSING_MESSAGE))
        self._pending.clear()
        await self._connector.close()

    # Called by the gateway's handlers.

    def submit(self, request: ChannelRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: the request id is already pending.
        """
        request_id = request.submission.request_id
        if request_id in self._pending:
            raise ValueError(f"request id {request_id!r} is already pending: ids must be unique")
        rejection = self._local_rejection(request.submission)
        if rejection is not None:
            request.on_rejection(rejection)
            return
        self._pending[request_id] = PendingRequest(request, self._loop.time())
        if self._link is not None:
            self._link.send(Submit(request.submission, 0.0, client_request_id=request.id_of_client))

    def put_back(
        self,
        request: ChannelRequest,
        failure: DispatchFailure,
        message: str = "",
        generated_tokens: int = 0,
        retry_after_s: float | None = None,
    ) -> None:
        """Queue a granted request again.

        Args:
            generated_tokens: output tokens so far with which the request continues; 0 if it starts again.
            retry_after_s: pause that the engine asks for; None if it asks for none.

        Raises:
            ValueError: the request does not run.
        """
        entry = self._entry(request)
        if entry is None or entry.replica_id is None:
            if self._closed:
                request.on_rejection(disconnected_rejection(_CLOSING_MESSAGE))
                return
            raise ValueError(f"request {request.submission.request_id!r} does not run: it cannot be put back")
        self._wait_again(entry, failure, message, generated_tokens, retry_after_s)

    def cancel(self, request: ChannelRequest) -> None:
        """Withdraw a request."""
        if self._entry(request) is not None:
            request_id = request.submission.request_id
            del self._pending[request_id]
            if self._link is not None:
                self._link.send(Cancelled(request_id))

    def watch(self, request: ChannelRequest) -> None:
        """Subscribe to the outlook of a waiting request; None is sent while the scheduler is disconnected."""
        if (entry := self._entry(request)) is not None:
            entry.watches_queue = True
            self._subscribe(entry)

    def first_token(self, request: ChannelRequest) -> None:
        """Report the first byte of the engine's streamed answer."""
        entry = self._entry(request)
        if entry is not None and not entry.started:
            # Comments about the queue end with the first output.
            entry.started, entry.watches_queue = True, False
            if self._link is not None:
                self._link.send(FirstToken(request.submission.request_id))

    def finish(
        self,
        request: ChannelRequest,
        outcome: Outcome,
        usage: Usage | None = None,
        times: RequestTimes | None = None,
        gap: DecodeGap | None = None,
    ) -> None:
        """Report the end of a granted request, which releases its capacity."""
        if self._entry(request) is None:
            return
        request_id = request.submission.request_id
        del self._pending[request_id]
        finish = Finished(request_id, outcome, usage, times, gap, request.seen_tokens)
        number = self._link.send(finish) if self._link is not None else 0
        self._unacknowledged_finishes.append((number, finish))

    def note_end(self, request: ChannelRequest, outcome: Outcome, times: RequestTimes) -> None:
        """Report the stage times of a request that ended in the queue, if a scheduler is connected."""
        # A scheduler that connects later has no receipt for it.
        request_id = request.submission.request_id
        if self._link is not None and request_id not in self._pending:
            self._link.send(Finished(request_id, outcome, None, times))

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        """Return the open replicas, which accept requests; empty without a connection."""
        return self._open_replicas if self._link is not None else ()

    def all_replicas(self) -> tuple[ReplicaAddress, ...]:
        """Return all replicas of the last table, even without a connection, and recently removed ones."""
        self._prune_departed()
        return (*self._table.values(), *(address for address, _ in self._departed.values()))

    def adapters(self) -> Mapping[str, frozenset[str]]:
        """Return the LoRA adapters of the last table, each with the ids of the replicas that list it."""
        return self._adapters

    async def exposition(self, *, with_gateways: bool) -> str:
        """Return the metrics as the protocol says; empty if none arrive within a second."""
        if self._link is None:
            return ""
        self._scrape_serial += 1
        serial = self._scrape_serial
        answer: asyncio.Future[str] = self._loop.create_future()
        self._scrapes[serial], self._other_metrics[serial] = answer, []
        self._link.send(Scrape(serial, with_gateways))
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                return await answer
        except TimeoutError:
            return ""
        finally:
            self._scrapes.pop(serial, None)
            self._other_metrics.pop(serial, None)

    async def query(self, name: str, **arguments: Any) -> Any:
        """Query the scheduler for an admin; the caller limits the time.

        Raises:
            ChannelError: the scheduler is disconnected or cannot answer.
        """
        if self._link is None:
            raise ChannelError("no scheduler is connected to this gateway")
        self._query_serial += 1
        serial = self._query_serial
        query = self._queries[serial] = _PendingQuery(self._loop.create_future())
        self._link.send(Query(serial, name, msgspec.json.encode(arguments)))
        try:
            return msgspec.json.decode(await query.answer)
        finally:
            self._queries.pop(serial, None)

    def register_metrics(self, render: Callable[[], Awaitable[str]]) -> None:
        """Register the function that renders this gateway's metrics when the scheduler requests them."""
        self._render_metrics = render

    # Called by the connector.

    def on_connected(self, link: Link, welcome: Welcome) -> None:
        """Send a snapshot: waiting and running requests, and unacknowledged `Finished` messages."""
        self._link = link
        self._queue_timeouts_s = welcome.queue_timeouts_s
        now = self._loop.time()
        for entry in list(self._pending.values()):
            link.send(entry.snapshot(now))
            self._subscribe(entry)
        self._unacknowledged_finishes = deque(
            (link.send(finish), finish) for _, finish in self._unacknowledged_finishes
        )
        link.send(SnapshotEnd())

    def on_message(self, message: Any) -> None:
        """Handle a message of the scheduler."""
        if isinstance(message, Granted):
            self._on_grant(message)
        elif isinstance(message, Rejected):
            self._on_rejection(message)
        elif isinstance(message, Revoked):
            self._on_revocation(message)
        elif isinstance(message, Outlooks):
            self._on_outlooks(message)
        elif isinstance(message, ReplicaTable):
            self._update_table(message)
            self._open_replicas = tuple(entry.address for entry in message.entries if entry.open)
        elif isinstance(message, Exposition):
            answer = self._scrapes.get(message.serial)
            if answer is not None and not answer.done():
                answer.set_result("".join((message.text, *self._other_metrics[message.serial])))
        elif isinstance(message, QueryResult):
            if (query := self._queries.get(message.serial)) is not None:
                query.add_part(message)
        elif isinstance(message, GatewayPage):
            self._other_metrics.get(message.serial, []).append(message.text)
        elif isinstance(message, PageRequest):
            self._on_page_request(message)
        else:
            raise ChannelError(f"unexpected message {type(message).__name__} from the scheduler")

    def _on_page_request(self, message: PageRequest) -> None:
        if self._render_metrics is not None and self._link is not None:
            work = self._send_metrics(self._render_metrics, self._link, message.serial)
            task = self._loop.create_task(work, context=contextvars.Context())
            self._render_tasks.add(task)
            task.add_done_callback(self._render_tasks.discard)

    async def _send_metrics(self, render: Callable[[], Awaitable[str]], link: Link, serial: int) -> None:
        link.send(GatewayPage(serial, await render()))

    def _prune_departed(self) -> None:
        since = self._loop.time() - _DEPARTED_RETENTION_S
        self._departed = {name: (address, at) for name, (address, at) in self._departed.items() if at > since}

    def _update_table(self, table: ReplicaTable) -> None:
        before, now = self._table, self._loop.time()
        self._table = {entry.address.replica_id: entry.address for entry in table.entries}
        self._departed |= {
            name: (address, now) for name, address in before.items() if name not in self._table
        }
        for name in self._table:
            self._departed.pop(name, None)
        # Also prune here, in case `all_replicas` is never called.
        self._prune_departed()
        holders: dict[str, set[str]] = {}
        for entry in table.entries:
            for adapter in entry.adapters:
                holders.setdefault(adapter, set()).add(entry.address.replica_id)
        self._adapters = {adapter: frozenset(ids) for adapter, ids in holders.items()}

    def on_disconnected(self) -> None:
        """Continue without a scheduler; no-wait requests are rejected."""
        self._link = None
        for query in self._queries.values():
            query.fail("the connection to the scheduler was lost before it responded")
        for entry in list(self._pending.values()):
            if entry.replica_id is None and entry.request.submission.no_wait:
                self._reject(entry, disconnected_rejection(NO_WAIT_REJECTED))
            else:
                self._subscribe(entry)

    def on_heartbeat(self) -> None:
        """Drop acknowledged `Finished` messages, and expire requests whose queue timeout has passed."""
        link = self._link
        while (
            self._unacknowledged_finishes
            and link is not None
            and 0 < self._unacknowledged_finishes[0][0] <= link.acknowledged
        ):
            self._unacknowledged_finishes.popleft()
        now = self._loop.time()
        grace_s = 0.0 if link is None else _EXPIRY_GRACE_S
        overdue = [
            entry
            for entry in self._pending.values()
            if entry.replica_id is None
            and now - entry.timed_since > self._timeout_s(entry.request.submission) + grace_s
        ]
        for entry in overdue:
            self._expire(entry, now)

    # Internals.

    def _on_grant(self, message: Granted) -> None:
        dispatch = message.dispatch
        entry = self._pending.get(dispatch.request_id)
        if entry is None or entry.replica_id is not None or message.grant <= entry.grants:
            return  # cancelled, or a repeated grant
        entry.grants, entry.replica_id = message.grant, dispatch.replica_id
        entry.started, entry.put_back = False, None
        address = self._table.get(dispatch.replica_id)
        if address is not None:
            entry.request.on_grant(dispatch, address)
        else:
            # The table precedes grants that refer to it; the request must not hang even if it did not.
            logger.error(
                "event=replica_address_missing request=%s replica=%s",
                dispatch.request_id,
                dispatch.replica_id,
            )
            self._wait_again(
                entry, DispatchFailure.UNREACHABLE, "the gateway does not know the address of the replica"
            )

    def _wait_again(
        self,
        entry: PendingRequest,
        failure: DispatchFailure,
        message: str,
        generated_tokens: int = 0,
        retry_after_s: float | None = None,
    ) -> None:
        replica_id = entry.replica_id
        assert replica_id is not None, "only a running request is put back"
        entry.put_back = PutBack(
            entry.request.submission.request_id,
            replica_id,
            failure,
            message,
            entry.grants,
            generated_tokens,
            retry_after_s,
        )
        entry.replica_id, entry.started = None, False
        if failure.is_after_service(generated_tokens):
            entry.timed_since = self._loop.time()
        if self._link is not None:
            self._link.send(entry.put_back)
        elif entry.request.submission.no_wait:
            self._reject(entry, disconnected_rejection(NO_WAIT_REJECTED))
            return
        self._subscribe(entry)

    def _subscribe(self, entry: PendingRequest) -> None:
        """Renew the subscription whenever a watched request begins to wait, because each grant ends it."""
        if not entry.watches_queue or entry.replica_id is not None:
            return
        if self._link is not None:
            self._link.send(Watch(entry.request.submission.request_id))
        else:
            entry.request.on_outlook(None)

    def _on_outlooks(self, message: Outlooks) -> None:
        for outlook in message.entries:
            entry = self._pending.get(outlook.request_id)
            if entry is not None and entry.replica_id is None and entry.watches_queue:
                entry.request.on_outlook(outlook)

    def _on_rejection(self, message: Rejected) -> None:
        if (entry := self._pending.get(message.request_id)) is not None:
            self._reject(entry, message.conclusion)

    def _on_revocation(self, message: Revoked) -> None:
        entry = self._pending.get(message.request_id)
        # Otherwise it is of an earlier grant.
        if entry is not None and entry.replica_id is not None and entry.grants == message.grant:
            entry.request.on_revocation()

    def _reject(self, entry: PendingRequest, rejection: Conclusion) -> None:
        """Reject a request if it waits."""
        request_id = entry.request.submission.request_id
        # The callback of another request may have ended this one.
        if self._pending.get(request_id) is entry and entry.replica_id is None:
            del self._pending[request_id]
            entry.request.on_rejection(rejection)

    def _entry(self, request: ChannelRequest) -> PendingRequest | None:
        """Return the entry of a request; None if it is not pending."""
        entry = self._pending.get(request.submission.request_id)
        return entry if entry is not None and entry.request is request else None

    def _expire(self, entry: PendingRequest, now: float) -> None:
        submission = entry.request.submission
        request_id = submission.request_id
        waited_s, timeout_s = now - entry.timed_since, self._timeout_s(submission)
        if self._link is not None:
            logger.error("event=queue_timeout_overdue request=%s waited_s=%.1f", request_id, waited_s)
            self._link.send(Cancelled(request_id))
        reason = "was not dispatched" if self._link is not None else "the scheduler is disconnected"
        message = (
            f"the request waited {waited_s:.1f} s in the queue (timeout {timeout_s:g} s) and {reason}: retry "
            "later, or send a longer x-queue-timeout-s"
        )
        self._reject(entry, Conclusion(Outcome.EXPIRED, message, DISCONNECTED_RETRY_AFTER_S))

    def _timeout_s(self, submission: Submission) -> float:
        if submission.queue_timeout_s is not None:
            return submission.queue_timeout_s
        return self._queue_timeouts_s.get(submission.priority, _DEFAULT_QUEUE_TIMEOUT_S)

    def _local_rejection(self, submission: Submission) -> Conclusion | None:
        """Return a rejection that needs no scheduler; None if there is none."""
        if self._closed:
            return disconnected_rejection(_CLOSING_MESSAGE)
        if self._link is not None:
            return None
        limit = self._settings.max_queued_disconnected
        return rejection_without_scheduler(submission, len(self._pending), limit)
