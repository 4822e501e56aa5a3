"""The gateway's end of the control channel: holds its requests and obtains grants from the scheduler.

`GatewayClient` is the authority on its gateway's requests; the protocol is described in `gateway_sessions`. A
request is pending from `acquire` until `finish`, a rejection or its cancellation. It waits (`answer` is not
set) or runs (by its last grant). Without a scheduler, waiting requests stay queued, running ones continue,
no-wait requests are rejected, and queue timeouts are enforced here.
"""

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.errors import ChannelError, Conclusion, Outcome
from serve_app.request import PriorityClass, Submission, Usage
from serve_app.serving.channel.connector import Connector, Locate
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import (
    Cancel,
    Exposition,
    Finish,
    First,
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
from serve_app.serving.channel.scheduler_client import Grant, ReplicaAddress, RequestOutlook, RequestTimes
from serve_app.serving.channel.settings import ChannelSettings

# `Retry-After` while a scheduler is being replaced, which takes a few seconds.
DISCONNECTED_RETRY_AFTER_S = 2.0
NO_WAIT_REJECTED = "the scheduler is disconnected, and the request must not wait"


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request of this gateway.

    Attributes:
        arrived_at: arrival, on this gateway's clock.
        answer: future of the last `acquire` or `put_back`.
        client_request_id: id chosen by the client; empty for none.
        grants: number of grants received.
        replica_id: replica on which it runs; None while it waits.
        started: its answer has begun.
        put_back: end of the last grant; None before the first one, and while it runs.
        on_outlook: subscriber of queue updates; None without one.
        on_revoke: called when its current grant is revoked; None if it is not revocable.
        timed_since: start of its queue timeout: its arrival, or a put-back after it was served in part.
    """

    submission: Submission
    arrived_at: float
    answer: asyncio.Future[Grant | Conclusion]
    client_request_id: str = ""
    grants: int = 0
    replica_id: str | None = None
    started: bool = False
    put_back: PutBack | None = None
    on_outlook: Callable[[RequestOutlook | None], None] | None = None
    on_revoke: Callable[[], None] | None = None
    timed_since: float = 0.0

    def __post_init__(self) -> None:
        self.timed_since = self.arrived_at

    @property
    def request_id(self) -> str:
        """Id of the request on the channel."""
        return self.submission.request_id

    @property
    def is_waiting(self) -> bool:
        """True if it has no grant."""
        return self.replica_id is None

    def record_grant(self, message: Granted) -> None:
        """Record a grant."""
        self.grants, self.replica_id = message.grant, message.dispatch.replica_id
        self.started, self.put_back = False, None

    def release_grant(self, failure: DispatchFailure, message: str, generated_tokens: int = 0) -> PutBack:
        """Release the grant, and return the put-back for the scheduler."""
        assert self.replica_id is not None, "only a running request is put back"
        self.put_back = PutBack(
            self.request_id, self.replica_id, failure, message, self.grants, generated_tokens
        )
        self.replica_id, self.started = None, False
        return self.put_back

    def snapshot_entry(self, now: float) -> Submit | Running:
        """Return the request's entry in a snapshot."""
        age_s = now - self.arrived_at
        client_id = self.client_request_id
        if self.replica_id is None:
            return Submit(self.submission, age_s, self.grants, self.put_back, client_id)
        return Running(self.submission, age_s, self.grants, self.replica_id, self.started, client_id)

    def answer_with(self, answer: Grant | Conclusion) -> None:
        """Answer the handler, unless it was cancelled."""
        if not self.answer.done():
            self.answer.set_result(answer)


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


logger = logging.getLogger("ray.serve")

_SCRAPE_TIMEOUT_S = 1.0
_CLOSING_MESSAGE = "this gateway is shutting down"
# Replicas that are missing from the table for longer are gone; a reconnect takes one or two seconds.
_DEPARTED_RETENTION_S = 10.0
# A connected scheduler enforces queue timeouts itself; one that is this late is faulty.
_EXPIRY_GRACE_S = 5.0
# Queue timeout of requests without their own, until a scheduler has sent the defaults.
_DEFAULT_QUEUE_TIMEOUT_S = 60.0


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
        self._unacknowledged_finishes: deque[tuple[int, Finish]] = deque()
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
        waiting = sum(pending.is_waiting for pending in self._pending.values())
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
        for pending in list(self._pending.values()):
            if pending.is_waiting:
                self._reject(pending, disconnected_rejection(_CLOSING_MESSAGE))
        self._pending.clear()
        await self._connector.close()

    # Called by the gateway's handlers.

    async def acquire(
        self,
        submission: Submission,
        client_request_id: str = "",
        on_revoke: Callable[[], None] | None = None,
    ) -> Grant | Conclusion:
        """Queue a request and wait for a grant.

        Args:
            client_request_id: id chosen by the client; empty for none.
            on_revoke: called when the current grant is revoked, maybe repeatedly.

        Raises:
            ValueError: the request id is already pending.
        """
        request_id = submission.request_id
        if request_id in self._pending:
            raise ValueError(f"request id {request_id!r} is already pending: ids must be unique")
        rejection = self._local_rejection(submission)
        if rejection is not None:
            return rejection
        now = self._loop.time()
        pending = PendingRequest(
            submission, now, self._loop.create_future(), client_request_id, on_revoke=on_revoke
        )
        self._pending[request_id] = pending
        if self._link is not None:
            self._link.send(Submit(submission, 0.0, client_request_id=client_request_id))
        return await self._answer(pending)

    async def put_back(
        self,
        request_id: str,
        replica_id: str,
        failure: DispatchFailure,
        message: str = "",
        generated_tokens: int = 0,
    ) -> Grant | Conclusion:
        """Put a granted request back that received no first byte, and wait for another grant.

        Args:
            generated_tokens: output tokens so far with which the request continues; 0 if it starts again.

        Raises:
            ValueError: the request is not running on that replica.
        """
        pending = self._pending.get(request_id)
        if pending is None or pending.replica_id != replica_id:
            if self._closed:
                return disconnected_rejection(_CLOSING_MESSAGE)
            raise ValueError(f"request {request_id!r} does not run on replica {replica_id!r}")
        pending.answer = self._loop.create_future()
        self._wait_again(pending, failure, message, generated_tokens)
        return await self._answer(pending)

    def watch(self, request_id: str, on_outlook: Callable[[RequestOutlook | None], None]) -> None:
        """Subscribe to the outlook of a waiting request; None is sent while the scheduler is disconnected."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.on_outlook = on_outlook
            self._subscribe(pending)

    def first_token(self, request_id: str) -> None:
        """Report the first byte of the engine's streamed answer."""
        pending = self._pending.get(request_id)
        if pending is not None and not pending.started:
            pending.started = True
            if self._link is not None:
                self._link.send(First(request_id))

    def finish(
        self,
        request_id: str,
        outcome: Outcome,
        usage: Usage | None = None,
        times: RequestTimes | None = None,
    ) -> None:
        """Report the end of a granted request, which releases its capacity."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        if not pending.answer.done():
            pending.answer.cancel()
        finish = Finish(request_id, outcome, usage, times)
        number = self._link.send(finish) if self._link is not None else 0
        self._unacknowledged_finishes.append((number, finish))

    def note_end(self, request_id: str, outcome: Outcome, times: RequestTimes) -> None:
        """Report the stage times of a request that ended in the queue, if a scheduler is connected."""
        # A scheduler that connects later has no receipt for it.
        if self._link is not None and request_id not in self._pending:
            self._link.send(Finish(request_id, outcome, None, times))

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

    async def exposition(self) -> str:
        """Return the metrics of the scheduler and of other gateways; empty if none arrive within a second."""
        if self._link is None:
            return ""
        self._scrape_serial += 1
        serial = self._scrape_serial
        answer: asyncio.Future[str] = self._loop.create_future()
        self._scrapes[serial], self._other_metrics[serial] = answer, []
        self._link.send(Scrape(serial))
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
        """Send a snapshot: waiting and running requests, and unacknowledged `Finish` messages."""
        self._link = link
        self._queue_timeouts_s = welcome.queue_timeouts_s
        now = self._loop.time()
        for pending in self._pending.values():
            link.send(pending.snapshot_entry(now))
            self._subscribe(pending)
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
        for pending in list(self._pending.values()):
            if pending.is_waiting and pending.submission.no_wait:
                self._reject(pending, disconnected_rejection(NO_WAIT_REJECTED))
            else:
                self._subscribe(pending)

    def on_heartbeat(self) -> None:
        """Drop acknowledged `Finish` messages, and expire requests whose queue timeout has passed."""
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
            pending
            for pending in self._pending.values()
            if pending.is_waiting
            and now - pending.timed_since > self._timeout_s(pending.submission) + grace_s
        ]
        for pending in overdue:
            self._expire(pending, now)

    # Internals.

    async def _answer(self, pending: PendingRequest) -> Grant | Conclusion:
        try:
            return await pending.answer
        except asyncio.CancelledError:
            # Also if a grant has arrived and the task was cancelled before it could use it.
            if self._pending.pop(pending.request_id, None) is not None and self._link is not None:
                self._link.send(Cancel(pending.request_id))
            raise

    def _on_grant(self, message: Granted) -> None:
        dispatch = message.dispatch
        pending = self._pending.get(dispatch.request_id)
        if pending is None or message.grant <= pending.grants:
            return  # cancelled, or a repeated grant
        pending.record_grant(message)
        address = self._table.get(dispatch.replica_id)
        if address is not None:
            pending.answer_with(Grant(dispatch, address))
        else:
            # The table precedes grants that refer to it; the request must not hang even if it did not.
            logger.error(
                "event=replica_address_missing request=%s replica=%s",
                dispatch.request_id,
                dispatch.replica_id,
            )
            self._wait_again(
                pending, DispatchFailure.UNREACHABLE, "the gateway does not know the address of the replica"
            )

    def _wait_again(
        self, pending: PendingRequest, failure: DispatchFailure, message: str, generated_tokens: int = 0
    ) -> None:
        put_back = pending.release_grant(failure, message, generated_tokens)
        if failure.is_after_service(generated_tokens):
            pending.timed_since = self._loop.time()
        if self._link is not None:
            self._link.send(put_back)
        self._subscribe(pending)

    def _subscribe(self, pending: PendingRequest) -> None:
        """Renew the subscription whenever a watched request begins to wait, because each grant ends it."""
        if pending.on_outlook is None or not pending.is_waiting:
            return
        if self._link is not None:
            self._link.send(Watch(pending.request_id))
        else:
            pending.on_outlook(None)

    def _on_outlooks(self, message: Outlooks) -> None:
        for outlook in message.entries:
            pending = self._pending.get(outlook.request_id)
            if pending is not None and pending.is_waiting and pending.on_outlook is not None:
                pending.on_outlook(outlook)

    def _on_rejection(self, message: Rejected) -> None:
        pending = self._pending.get(message.request_id)
        if pending is not None and pending.is_waiting:
            self._reject(pending, message.conclusion)

    def _on_revocation(self, message: Revoked) -> None:
        pending = self._pending.get(message.request_id)
        if pending is None or pending.is_waiting or pending.grants != message.grant:
            return  # of an earlier grant
        if pending.on_revoke is not None:
            pending.on_revoke()

    def _reject(self, pending: PendingRequest, rejection: Conclusion) -> None:
        del self._pending[pending.request_id]
        pending.answer_with(rejection)

    def _expire(self, pending: PendingRequest, now: float) -> None:
        waited_s, timeout_s = now - pending.timed_since, self._timeout_s(pending.submission)
        if self._link is not None:
            logger.error("event=queue_timeout_overdue request=%s waited_s=%.1f", pending.request_id, waited_s)
            self._link.send(Cancel(pending.request_id))
        reason = "was not dispatched" if self._link is not None else "the scheduler is disconnected"
        message = (
            f"the request waited {waited_s:.1f} s in the queue (timeout {timeout_s:g} s) and {reason}: retry "
            "later, or send a longer x-queue-timeout-s"
        )
        self._reject(pending, Conclusion(Outcome.EXPIRED, message, DISCONNECTED_RETRY_AFTER_S))

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
