"""The gateway's end of the control channel: holds its requests and asks the scheduler for grants.

The rules are those at the top of `gateway_sessions`; this is the authority they speak of. A request is
pending from `acquire` until `finished`, a refusal, or its cancellation. It waits (`answer` is pending) or
runs (by its last grant). While no scheduler is there, what waits goes on waiting and what runs goes on
running; requests that would not wait are refused, and those whose time in the queue ends are expired
here.
"""

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from serve_app.errors import ChannelError, Conclusion, Outcome
from serve_app.request import PriorityClass, Submission, Usage
from serve_app.scheduling.events import DispatchFailure
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
    Refused,
    ReplicaTable,
    Role,
    Scrape,
    SnapshotEnd,
    Submit,
    Watch,
    Welcome,
)
from serve_app.serving.channel.requests.pending_request import (
    AWAY_RETRY_AFTER_S,
    REFUSES_TO_WAIT,
    PendingRequest,
    refuse_alone,
    refuse_away,
    refuse_oversized,
)
from serve_app.serving.channel.scheduler_client import Grant, ReplicaAddress, RequestOutlook, RequestTimes
from serve_app.serving.channel.settings import ChannelSettings

logger = logging.getLogger("ray.serve")

_EXPOSITION_S = 1.0
_CLOSING = "this gateway is shutting down"
# A replica that is missing from the table for longer is gone; one that reconnects takes a second or two.
_LATELY_S = 10.0
# A connected scheduler ends a request's time in the queue itself; one that is so late is out of order.
_OVERDUE_S = 5.0
# Time in the queue for a request without its own, until a scheduler names a default.
_OFFLINE_TIMEOUT_S = 60.0


class GatewayClient:
    """One model's scheduler as seen from one gateway; implements `SchedulerClient`.

    Args:
        gateway_id: unique to this process and its start; a second user of the same id throws the first out.
        locate: finds the scheduler; in production a call on a Ray handle.
    """

    def __init__(self, gateway_id: str, locate: Locate, settings: ChannelSettings) -> None:
        self._gateway_id = gateway_id
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._connector = Connector(Role.GATEWAY, gateway_id, locate, settings, self)
        self._link: Link | None = None
        self._pending: dict[str, PendingRequest] = {}
        # Ends without a receipt, with the number of the message that told of each; 0 when none could.
        self._ended: deque[tuple[int, Finish]] = deque()
        self._table: dict[str, ReplicaAddress] = {}
        self._left: dict[str, tuple[ReplicaAddress, float]] = {}
        self._adapters: Mapping[str, frozenset[str]] = {}
        self._open: tuple[ReplicaAddress, ...] = ()
        self._queue_timeouts_s: dict[PriorityClass, float] = {}
        self._scrapes: dict[int, asyncio.Future[str]] = {}
        # Pages of other gateways, until the last part of the answer to a scrape comes.
        self._others: dict[int, list[str]] = {}
        self._scrape_serial = 0
        self._own_page: Callable[[], Awaitable[str]] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        waiting = sum(pending.waits for pending in self._pending.values())
        return (
            f"<GatewayClient {self._gateway_id} waiting {waiting}, running {len(self._pending) - waiting}, "
            f"{'connected' if self._link else 'alone'}>"
        )

    @property
    def is_connected(self) -> bool:
        """Whether a scheduler hears us."""
        return self._link is not None

    @property
    def incarnation(self) -> int:
        """The highest incarnation of the scheduler met so far, 0 before the first."""
        return self._connector.highest_incarnation

    def start(self) -> None:
        """Begin to look for the scheduler."""
        self._connector.start()

    async def close(self) -> None:
        """Refuse what waits, say goodbye, and stop; what runs is released by the scheduler."""
        self._closed = True
        for pending in list(self._pending.values()):
            if pending.waits:
                self._refuse(pending, refuse_away(_CLOSING))
        self._pending.clear()
        await self._connector.close()

    # What the gateway's handler calls.

    async def acquire(self, submission: Submission, client_request_id: str = "") -> Grant | Conclusion:
        """Queue a request and wait for its turn.

        Args:
            client_request_id: the id that its client gave it; empty where it gave none.

        Raises:
            ValueError: the request id is pending already.
        """
        request_id = submission.request_id
        if request_id in self._pending:
            raise ValueError(f"request id {request_id!r} is pending already: ids must be unique")
        refusal = self._objection(submission)
        if refusal is not None:
            return refusal
        now = self._loop.time()
        pending = PendingRequest(submission, now, self._loop.create_future(), client_request_id)
        self._pending[request_id] = pending
        if self._link is not None:
            self._link.send(Submit(submission, 0.0, 0.0, client_request_id=client_request_id))
        return await self._answer(pending)

    async def put_back(
        self, request_id: str, replica_id: str, failure: DispatchFailure, message: str = ""
    ) -> Grant | Conclusion:
        """Return a granted request that got no first byte, and wait for another turn at the front.

        Raises:
            ValueError: the request is not running on that replica.
        """
        pending = self._pending.get(request_id)
        if pending is None or pending.replica_id != replica_id:
            if self._closed:
                return refuse_away(_CLOSING)
            raise ValueError(f"request {request_id!r} does not run on replica {replica_id!r}")
        pending.answer = self._loop.create_future()
        self._wait_again(pending, failure, message)
        return await self._answer(pending)

    def watch(self, request_id: str, on_outlook: Callable[[RequestOutlook | None], None]) -> None:
        """Be told how a request of ours stands in the queue; None while the scheduler is away."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.on_outlook = on_outlook
            self._ask_for_outlook(pending)

    def first_token(self, request_id: str) -> None:
        """The first byte of the engine's streamed answer has come."""
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
        """The request is over and its place is free."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        if not pending.answer.done():
            pending.answer.cancel()
        finish = Finish(request_id, outcome, usage, times)
        self._ended.append((self._link.send(finish) if self._link is not None else 0, finish))

    def note_end(self, request_id: str, outcome: Outcome, times: RequestTimes) -> None:
        """A request has ended in the queue: tell what its receipt should say, if it can be told now."""
        # A scheduler that comes later has no receipt of it.
        if self._link is not None and request_id not in self._pending:
            self._link.send(Finish(request_id, outcome, None, times))

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        """The open replicas, which take requests now; empty while the scheduler is unknown."""
        return self._open if self._link is not None else ()

    def all_replicas(self) -> tuple[ReplicaAddress, ...]:
        """All replicas of the last table, also while nobody is connected, and those that left it lately."""
        self._forget_left()
        return (*self._table.values(), *(address for address, _ in self._left.values()))

    def adapters(self) -> Mapping[str, frozenset[str]]:
        """The LoRA adapters of the last table, each with the ids of the replicas that list it."""
        return self._adapters

    async def exposition(self) -> str:
        """Return the metrics of the scheduler and of other gateways; empty when none come in a second."""
        if self._link is None:
            return ""
        self._scrape_serial += 1
        serial = self._scrape_serial
        answer: asyncio.Future[str] = self._loop.create_future()
        self._scrapes[serial], self._others[serial] = answer, []
        self._link.send(Scrape(serial))
        try:
            async with asyncio.timeout(_EXPOSITION_S):
                return await answer
        except TimeoutError:
            return ""
        finally:
            self._scrapes.pop(serial, None)
            self._others.pop(serial, None)

    def show(self, own_page: Callable[[], Awaitable[str]]) -> None:
        """Tell the scheduler this page when it asks for the gateway's own metrics."""
        self._own_page = own_page

    # What the connector calls.

    def on_connected(self, link: Link, welcome: Welcome) -> None:
        """Tell a scheduler everything: what waits, what runs, what ended without a receipt."""
        self._link = link
        self._queue_timeouts_s = welcome.queue_timeouts_s
        now = self._loop.time()
        for pending in self._pending.values():
            link.send(pending.described(now))
            self._ask_for_outlook(pending)
        self._ended = deque((link.send(finish), finish) for _, finish in self._ended)
        link.send(SnapshotEnd())

    def on_message(self, message: Any) -> None:
        """Take one message of the scheduler."""
        if isinstance(message, Granted):
            self._on_grant(message)
        elif isinstance(message, Refused):
            self._on_refusal(message)
        elif isinstance(message, Outlooks):
            self._on_outlooks(message)
        elif isinstance(message, ReplicaTable):
            self._take_table(message)
            self._open = tuple(entry.address for entry in message.entries if entry.open)
        elif isinstance(message, Exposition):
            answer = self._scrapes.get(message.serial)
            if answer is not None and not answer.done():
                answer.set_result("".join((message.text, *self._others[message.serial])))
        elif isinstance(message, GatewayPage):
            self._others.get(message.serial, []).append(message.text)
        elif isinstance(message, PageRequest):
            if self._own_page is not None and self._link is not None:
                work = self._tell_page(self._own_page, self._link, message.serial)
                task = self._loop.create_task(work, context=contextvars.Context())
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)
        else:
            raise ChannelError(f"a scheduler does not say {type(message).__name__} to a gateway")

    async def _tell_page(self, own_page: Callable[[], Awaitable[str]], link: Link, serial: int) -> None:
        link.send(GatewayPage(serial, await own_page()))

    def _forget_left(self) -> None:
        since = self._loop.time() - _LATELY_S
        self._left = {name: (address, at) for name, (address, at) in self._left.items() if at > since}

    def _take_table(self, table: ReplicaTable) -> None:
        before, now = self._table, self._loop.time()
        self._table = {entry.address.replica_id: entry.address for entry in table.entries}
        self._left |= {name: (address, now) for name, address in before.items() if name not in self._table}
        for name in self._table:
            self._left.pop(name, None)
        # Also where nobody asks for them.
        self._forget_left()
        holders: dict[str, set[str]] = {}
        for entry in table.entries:
            for adapter in entry.adapters:
                holders.setdefault(adapter, set()).add(entry.address.replica_id)
        self._adapters = {adapter: frozenset(ids) for adapter, ids in holders.items()}

    def on_disconnected(self) -> None:
        """Go on alone; whoever did not want to wait is told so."""
        self._link = None
        for pending in list(self._pending.values()):
            if pending.waits and pending.submission.no_wait:
                self._refuse(pending, refuse_away(REFUSES_TO_WAIT))
            else:
                self._ask_for_outlook(pending)

    def on_heartbeat(self) -> None:
        """Forget ends that have their receipt, and end what has waited its time out."""
        link = self._link
        while self._ended and link is not None and 0 < self._ended[0][0] <= link.acknowledged:
            self._ended.popleft()
        now = self._loop.time()
        grace_s = 0.0 if link is None else _OVERDUE_S
        overdue = [
            pending
            for pending in self._pending.values()
            if pending.waits and now - pending.born_at > self._timeout_s(pending.submission) + grace_s
        ]
        for pending in overdue:
            self._expire(pending, now)

    # How it works.

    async def _answer(self, pending: PendingRequest) -> Grant | Conclusion:
        try:
            return await pending.answer
        except asyncio.CancelledError:
            # Also when a grant has come, and this task was cancelled before it could take it.
            if self._pending.pop(pending.request_id, None) is not None and self._link is not None:
                self._link.send(Cancel(pending.request_id))
            raise

    def _on_grant(self, message: Granted) -> None:
        dispatch = message.dispatch
        pending = self._pending.get(dispatch.request_id)
        if pending is None or message.grant <= pending.grants:
            return  # cancelled meanwhile, or told twice
        pending.run(message)
        address = self._table.get(dispatch.replica_id)
        if address is not None:
            pending.answer_with(Grant(dispatch, address))
        else:
            # The table precedes the grants that refer to it; if it did not, the request must not hang.
            logger.error("event=no_address request=%s replica=%s", dispatch.request_id, dispatch.replica_id)
            self._wait_again(pending, DispatchFailure.UNREACHABLE, "the gateway does not know its address")

    def _wait_again(self, pending: PendingRequest, failure: DispatchFailure, message: str) -> None:
        put_back = pending.wait(failure, message)
        if self._link is not None:
            self._link.send(put_back)
        self._ask_for_outlook(pending)

    def _ask_for_outlook(self, pending: PendingRequest) -> None:
        """Ask anew wherever a watched request begins to wait: a scheduler forgets it with each grant."""
        if pending.on_outlook is None or not pending.waits:
            return
        if self._link is not None:
            self._link.send(Watch(pending.request_id))
        else:
            pending.on_outlook(None)

    def _on_outlooks(self, message: Outlooks) -> None:
        for outlook in message.entries:
            pending = self._pending.get(outlook.request_id)
            if pending is not None and pending.waits and pending.on_outlook is not None:
                pending.on_outlook(outlook)

    def _on_refusal(self, message: Refused) -> None:
        pending = self._pending.get(message.request_id)
        if pending is not None and pending.waits:
            self._refuse(pending, message.conclusion)

    def _refuse(self, pending: PendingRequest, refusal: Conclusion) -> None:
        del self._pending[pending.request_id]
        pending.answer_with(refusal)

    def _expire(self, pending: PendingRequest, now: float) -> None:
        waited_s = now - pending.born_at
        if self._link is not None:
            logger.error("event=overdue request=%s waited_s=%.1f", pending.request_id, waited_s)
            self._link.send(Cancel(pending.request_id))
        why = "its turn did not come" if self._link is not None else "the scheduler is away"
        text = f"the request waited {waited_s:.1f} s in the queue and {why}"
        self._refuse(pending, Conclusion(Outcome.EXPIRED, text, AWAY_RETRY_AFTER_S))

    def _timeout_s(self, submission: Submission) -> float:
        if submission.queue_timeout_s is not None:
            return submission.queue_timeout_s
        return self._queue_timeouts_s.get(submission.priority, _OFFLINE_TIMEOUT_S)

    def _objection(self, submission: Submission) -> Conclusion | None:
        """Refuse a request without asking the scheduler, or not."""
        if self._closed:
            return refuse_away(_CLOSING)
        refusal = refuse_oversized(submission)
        if refusal is None and self._link is None:
            return refuse_alone(submission, len(self._pending), self._settings.max_waiting_offline)
        return refusal
