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
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.errors import ChannelError, Conclusion, Outcome
from serve_app.request import PriorityClass, Submission, Usage
from serve_app.serving.channel.connector import Connector, Locate
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import (
    Answer,
    Cancel,
    Exposition,
    Finish,
    First,
    GatewayPage,
    Granted,
    Outlooks,
    PageRequest,
    PutBack,
    Question,
    Refused,
    ReplicaTable,
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

# What a client should wait while a scheduler is being replaced, which takes a few seconds.
AWAY_RETRY_AFTER_S = 2.0
REFUSES_TO_WAIT = "the scheduler is away, and the request does not wait"
# More than any prompt has; keeps a submission far below the size of a frame.
_MAX_PREFIX_HASHES = 8192
_MAX_NAME_CHARS = 4096


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request.

    Attributes:
        born_at: when it came in, on this gateway's clock.
        answer: what its handler waits for, or waited for last.
        client_request_id: the id that its client gave it; empty for none.
        grants: how many it has seen.
        replica_id: where it runs; None while it waits.
        started: its answer has begun.
        put_back: how the last grant ended; None before one, and while it runs.
        on_outlook: who wants to know how it stands in the queue; None where nobody asks.
    """

    submission: Submission
    born_at: float
    answer: asyncio.Future[Grant | Conclusion]
    client_request_id: str = ""
    grants: int = 0
    replica_id: str | None = None
    started: bool = False
    put_back: PutBack | None = None
    on_outlook: Callable[[RequestOutlook | None], None] | None = None

    @property
    def request_id(self) -> str:
        """Its name on the channel."""
        return self.submission.request_id

    @property
    def waits(self) -> bool:
        """Whether it has no grant."""
        return self.replica_id is None

    def run(self, message: Granted) -> None:
        """Go on by a grant."""
        self.grants, self.replica_id = message.grant, message.dispatch.replica_id
        self.started, self.put_back = False, None

    def wait(self, failure: DispatchFailure, message: str) -> PutBack:
        """Give the grant back; return what the scheduler is to be told."""
        assert self.replica_id is not None, "only a running request is put back"
        self.put_back = PutBack(self.request_id, self.replica_id, failure, message, self.grants)
        self.replica_id, self.started = None, False
        return self.put_back

    def described(self, now: float) -> Submit | Running:
        """Return its line in a snapshot."""
        age_s = now - self.born_at
        named = self.client_request_id
        if self.replica_id is None:
            return Submit(self.submission, age_s, self.grants, self.put_back, named)
        return Running(self.submission, age_s, self.grants, self.replica_id, self.started, named)

    def answer_with(self, answer: Grant | Conclusion) -> None:
        """Answer its handler, unless that has gone."""
        if not self.answer.done():
            self.answer.set_result(answer)


def refuse_away(text: str) -> Conclusion:
    """Nobody is there to schedule it, for the moment."""
    return Conclusion(Outcome.REJECTED_NO_REPLICA, text, AWAY_RETRY_AFTER_S)


def refuse_oversized(submission: Submission) -> Conclusion | None:
    """Refuse what would not fit a frame."""
    hashes = len(submission.prefix)
    name = max(len(submission.request_id), len(submission.spec.model), len(submission.tenant))
    if hashes <= _MAX_PREFIX_HASHES and name <= _MAX_NAME_CHARS:
        return None
    text = (
        f"a request may have {_MAX_PREFIX_HASHES} prefix hashes and names of {_MAX_NAME_CHARS} characters; "
        f"this one has {hashes}, and a name of {name}"
    )
    return Conclusion(Outcome.REJECTED_INVALID, text)


def refuse_alone(submission: Submission, pending: int, limit: int) -> Conclusion | None:
    """Refuse, while no scheduler is there, what would not wait or would be one too many."""
    if submission.no_wait:
        return refuse_away(REFUSES_TO_WAIT)
    if pending < limit:
        return None
    text = f"the scheduler is away, and {pending} requests wait for it at this gateway already"
    return Conclusion(Outcome.REJECTED_QUEUE_FULL, text, AWAY_RETRY_AFTER_S)


logger = logging.getLogger("ray.serve")

_EXPOSITION_S = 1.0
_CLOSING = "this gateway is shutting down"
# A replica that is missing from the table for longer is gone; one that reconnects takes a second or two.
_LATELY_S = 10.0
# A connected scheduler ends a request's time in the queue itself; one that is so late is out of order.
_OVERDUE_S = 5.0
# Time in the queue for a request without its own, until a scheduler names a default.
_OFFLINE_TIMEOUT_S = 60.0


class _Asked:
    """A question on its way, and the parts of its answer that have come."""

    def __init__(self, answer: asyncio.Future[bytes]) -> None:
        self.answer = answer
        self._parts: list[bytes] = []

    def take(self, message: Answer) -> None:
        self._parts.append(message.part)
        if message.error:
            self.fail(message.error)
        elif message.is_last and not self.answer.done():
            self.answer.set_result(b"".join(self._parts))

    def fail(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ChannelError(reason))


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
        self._questions: dict[int, _Asked] = {}
        self._question_serial = 0
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
            self._link.send(Submit(submission, 0.0, client_request_id=client_request_id))
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

    async def ask(self, question: str, **arguments: Any) -> Any:
        """Return the scheduler's answer to a question of an admin; the caller limits the time.

        Raises:
            ChannelError: the scheduler is away, or cannot answer.
        """
        if self._link is None:
            raise ChannelError("no scheduler is connected to this gateway")
        self._question_serial += 1
        serial = self._question_serial
        asked = self._questions[serial] = _Asked(self._loop.create_future())
        self._link.send(Question(serial, question, msgspec.json.encode(arguments)))
        try:
            return msgspec.json.decode(await asked.answer)
        finally:
            self._questions.pop(serial, None)

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
        elif isinstance(message, Answer):
            if (asked := self._questions.get(message.serial)) is not None:
                asked.take(message)
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
        for asked in self._questions.values():
            asked.fail("the scheduler was lost before it answered")
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
