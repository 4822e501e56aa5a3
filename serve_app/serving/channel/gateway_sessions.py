r"""The scheduler's sessions with its gateways: reconciliation of requests, and the messages about them.

- `GatewaySessions`: converts messages of gateways to events, by the rules below.
- `OrphanDetector`: running requests of a lost gateway, which keep their holds until their engine has finished
  them.
- `ReplicaRegistry`: the registry of pool replicas, and the replica table of the gateways.
- `GatewayMetrics`: metrics of other gateways, which are collected for the one that is scraped.

`GatewaySessions`. Invariants: a request that a gateway holds is waiting or running here, or will be once the
gateway is connected; a request is answered once; a grant is used at most once; the ledger holds capacity for
exactly the requests that run. Any connection may break between any two messages, and the scheduler may be
replaced by one without state. The rules that ensure this:

1.  *The gateway is the authority on its requests*, because it holds the client's connection. The scheduler's
    state is a copy, rebuilt from the gateway's snapshot on each new connection. The scheduler is the
    authority on grants, because it holds the ledger.
2.  *Grants of a request are numbered* 1, 2, 3, ... by the scheduler. Both sides count those issued or
    received, and a new scheduler continues from the gateway's count. A gateway ignores a number that it has
    received before. If a request runs here and waits there, the counts identify the lost message. If the
    gateway has received fewer grants than were issued, the grant was lost and is sent again. If it has
    received as many, its put-back was lost, and the snapshot repeats it.
3.  *Each connection begins with a snapshot*: waiting requests, running requests, unacknowledged ends, and an
    end mark. Each entry is reconciled as it is read:

        here \ there   waits                          runs                     ended           (not in it)
        unknown        Arrived                        Resumed                  -               -
        waits          -                              Cancelled, Resumed (a)   Cancelled (a)   Cancelled
        runs           grant again, or put-back (2)   - (or FirstToken) (b)    Finished        Cancelled

    (a) cannot result from lost messages; if it occurs, the gateway's state is used. The same holds for a
    request that waits there although the counts are equal and no put-back was lost: Cancelled, Arrived.
    (b) If replica or count differ: Cancelled, Resumed, as in (a).
    During a snapshot, the only other change for this gateway is a grant of one of its waiting requests. It is
    sent as usual; if the request's entry is read after it, it is sent twice (2).
4.  *The gateway retains ends until the scheduler has acknowledged them* (`Link.acknowledged`), so that a
    finished request is not mistaken for one whose client disconnected. A repeated end refers to an unknown
    request and is ignored; request ids are never reused.
5.  *A lost rejection needs no rule*: the request is unknown here and waits there. It arrives again with its
    true age, and is rejected again or admitted. The client receives one answer.
6.  *A disconnected gateway keeps its requests for a grace period.* Grants issued in that time are lost ones
    by rule 2. Afterwards waiting requests are released. Running ones keep their holds until reports of their
    engines show that they have ended (`OrphanDetector`), because the engines may still be computing them. A
    gateway that reconnects later recovers them by rule 3.
7.  *A new connection of a gateway replaces the old one*, which is not read again. A gateway has one
    connection and each process its own gateway id, so a connection only replaces its predecessor.
8.  *A grant that can no longer be delivered*, because its replica left before the gateway received the grant,
    is put back here on behalf of the gateway: the replica never received the request.

`OrphanDetector`. A disconnected gateway may be dead; its engines then notice the closed connections and stop.
It may also be cut off or busy, and its requests continue. Only the engines know. So the capacity of these
requests is released as reports show that engines run fewer requests than hold capacity on them:

    ended = requests with a hold, granted long enough before the report to be in it - waiting - running

An engine counts sequences, of which a request may have several, and newer requests besides. Both lower
`ended`, so an orphan may hold capacity too long, until the engine is less busy, but never too short. Requests
of other gateways whose end is still in transit raise it briefly, so two consecutive checks must agree.

`ReplicaRegistry`. A replica that loses its connection receives no new requests, and nothing else follows. Its
running requests stay in the ledger until the gateways, which are connected to it directly, report their ends.
A glitch of this channel thus fails no request. On reconnect the replica joins again with its current limits,
and its running requests keep their holds. A replica whose engine fails reports that and is treated in the
same way, but stays connected and registers again once the engine answers.

The table lists which replicas are *open*, that is, accept new requests. After changes it is sent to all
gateways once: at the end of the current loop iteration, or before a grant, which refers to it. Otherwise a
thousand replicas that change together would cause a thousand tables.
"""

import asyncio
import contextvars
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from serve_app.core import Scheduler
from serve_app.core.commands import Conclude, Dispatch, Revoke
from serve_app.core.events import (
    Arrived,
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Event,
    Finished,
    FirstToken,
    GatewayLost,
    Message,
    ReplicaJoined,
    ReplicaLost,
    ReplicaReported,
    Resumed,
)
from serve_app.core.request import ScheduledRequest, of_gateway
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.engines.adapters.server import stated_context_limit
from serve_app.errors import ChannelError, Conclusion, Outcome
from serve_app.request import PriorityClass, Request, RequestTimes
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import (
    EngineFailed,
    Exposition,
    GatewayPage,
    Granted,
    Outlooks,
    PageRequest,
    PutBack,
    Query,
    QueryResult,
    Register,
    Rejected,
    ReplicaEntry,
    ReplicaTable,
    Report,
    Revoked,
    Running,
    Scrape,
    SnapshotEnd,
    Submit,
    Watch,
)
from serve_app.serving.channel.scheduler_client import ReplicaAddress, RequestOutlook

# A check visits all requests, so it is done once for many reports.
_CHECK_INTERVAL_S = 0.5
# A grant reaches its engine in milliseconds, and a report is at most some tenths of a second old.
_SETTLED_S = _CHECK_INTERVAL_S + 0.5


class OrphanDetector:
    """Detector of orphans that have ended; reports are needed only while `has_orphans`.

    Args:
        is_lost: returns whether a gateway is lost.
    """

    def __init__(self, requests: Mapping[str, ScheduledRequest], is_lost: Callable[[str], bool]) -> None:
        self._requests = requests
        self._is_lost = is_lost
        # Last report of each replica since the last check.
        self._reports: dict[str, ReplicaReport] = {}
        # Ended requests of the last check that were not attributed to orphans, by replica.
        self._ended: dict[str, int] = {}
        self._check_at = 0.0
        self.has_orphans = False

    def on_report(self, replica_id: str, report: ReplicaReport, now: float) -> list[str]:
        """Record a report, and at intervals return the orphans that have ended, by id."""
        self._reports[replica_id] = report
        if now < self._check_at:
            return []
        self._check_at = now + _CHECK_INTERVAL_S
        return self._check(now)

    def _check(self, now: float) -> list[str]:
        found: list[str] = []
        settled: Counter[str] = Counter()
        orphans: dict[str, list[str]] = defaultdict(list)
        for scheduled in self._requests.values():
            replica_id, request = scheduled.replica_id, scheduled.request
            if replica_id is None:
                continue
            if self._is_lost(request.gateway_id):
                orphans[replica_id].append(request.request_id)
            settled[replica_id] += scheduled.dispatched_at <= now - _SETTLED_S
        self.has_orphans = bool(orphans)
        reports, self._reports = self._reports, {}
        before, self._ended = self._ended, {}
        for replica_id, request_ids in orphans.items():
            report = reports.get(replica_id)
            if report is None or report.waiting is None or report.running is None:
                # Without the engine's own counts, ends cannot be inferred.
                continue
            ended = settled[replica_id] - report.waiting - report.running
            agreed = max(0, min(ended, before.get(replica_id, 0), len(request_ids)))
            self._ended[replica_id] = ended - agreed
            found += request_ids[:agreed]
        return found


logger = logging.getLogger("ray.serve")


@dataclass(slots=True, eq=False)
class _Replica:
    link: Link
    spec: ReplicaSpec
    address: ReplicaAddress
    report: ReplicaReport | None = None
    stale: bool = False

    @property
    def open(self) -> bool:
        return self.report is not None and not (self.report.draining or self.stale)


class ReplicaRegistry:
    """Registry that converts replicas' messages to events and maintains the table."""

    def __init__(self, feed: Callable[[Event], None], publish: Callable[[ReplicaTable], None]) -> None:
        self._feed = feed
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._replicas: dict[str, _Replica] = {}
        self._table = ReplicaTable([])
        self._publishing: asyncio.Handle | None = None

    def __repr__(self) -> str:
        still_open = sum(replica.open for replica in self._replicas.values())
        return f"<ReplicaRegistry replicas {len(self._replicas)}, open {still_open}>"

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    @property
    def table(self) -> ReplicaTable:
        """The current table; pending changes are sent to the gateways first."""
        self.publish_changes()
        return self._table

    def publish_changes(self) -> None:
        """Send pending changes of the table to the gateways now."""
        if self._publishing is None:
            return
        self._publishing.cancel()
        self._publishing = None
        self._table = ReplicaTable(
            [
                ReplicaEntry(replica.address, replica.open, replica.spec.adapters)
                for replica in self._replicas.values()
            ]
        )
        self._publish(self._table)

    def reports(self) -> dict[str, tuple[ReplicaSpec, ReplicaReport | None]]:
        """Return the limits and the last report of each connected replica."""
        return {replica_id: (replica.spec, replica.report) for replica_id, replica in self._replicas.items()}

    def on_message(self, replica_id: str, link: Link, message: Message) -> None:
        """Handle a message of a connected replica."""
        if isinstance(message, Register):
            self._register(replica_id, link, message)
        elif isinstance(message, Report):
            self._report(replica_id, message)
        elif isinstance(message, EngineFailed):
            logger.error("event=replica_failed replica=%s reason=%r", replica_id, message.reason)
            self.on_loss(replica_id, link)
        else:
            raise ChannelError(f"replica {replica_id} sent an unexpected message: {type(message).__name__}")

    def on_loss(self, replica_id: str, link: Link) -> None:
        """Handle the loss of a replica's connection, or the failure of its engine."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.link is link:
            del self._replicas[replica_id]
            self._on_change()
            self._feed(ReplicaLost(replica_id))

    def on_stale(self, replica_id: str) -> None:
        """Close a replica whose last report is too old; its next report opens it again."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.stale = True
            self._on_change()

    def _register(self, replica_id: str, link: Link, message: Register) -> None:
        spec, address = message.spec, message.address
        if not spec.replica_id == address.replica_id == replica_id or spec.pool != address.pool:
            raise ChannelError(
                f"replica {replica_id} registers with other ids: {spec}, at {address.host}:{address.port}"
            )
        if replica_id in self._replicas:
            del self._replicas[replica_id]
        self._replicas[replica_id] = _Replica(link, spec, address)
        self._on_change()
        self._feed(ReplicaJoined(spec))

    def _report(self, replica_id: str, message: Report) -> None:
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise ChannelError(f"replica {replica_id} reports before it registers")
        was_open = replica.open
        replica.report, replica.stale = message.report, False
        if replica.open != was_open:
            self._on_change()
        self._feed(ReplicaReported(replica_id, message.report))

    def _on_change(self) -> None:
        if self._publishing is None:
            self._publishing = self._loop.call_soon(self.publish_changes)


# Less than the second after which the requesting gateway gives up.
_EXPOSITION_TIMEOUT_S = 0.6


class GatewayMetrics:
    """Collector of the metrics of other gateways; `links` returns the connected ones by id."""

    def __init__(self, links: Callable[[], Mapping[str, Link]]) -> None:
        self._links = links
        self._serial = 0
        self._answers: dict[tuple[str, int], asyncio.Future[str]] = {}

    def __repr__(self) -> str:
        return f"<GatewayMetrics pending {len(self._answers)}>"

    async def of_others(self, gateway_id: str) -> Iterable[str]:
        """Return the metrics of all gateways but this one that arrive in time."""
        loop = asyncio.get_running_loop()
        self._serial += 1
        pending: dict[tuple[str, int], asyncio.Future[str]] = {}
        for name, link in self._links().items():
            if name != gateway_id and link.send(PageRequest(self._serial)):
                pending[name, self._serial] = loop.create_future()
        if not pending:
            return ()
        self._answers |= pending
        try:
            done, _ = await asyncio.wait(pending.values(), timeout=_EXPOSITION_TIMEOUT_S)
        finally:
            for key in pending:
                self._answers.pop(key, None)
        return [answer.result() for answer in pending.values() if answer in done]

    def on_metrics(self, gateway_id: str, message: GatewayPage) -> None:
        """Handle the metrics of a gateway; late ones are dropped."""
        answer = self._answers.get((gateway_id, message.serial))
        if answer is not None and not answer.done():
            answer.set_result(message.text)


# No engine works this long for a disconnected client; the limit is for engines that never report again.
_ORPHAN_TIMEOUT_S = 900.0
# Part of an answer; far below the frame limit.
_PART_BYTES = 64 * 1024


@dataclass(slots=True, eq=False)
class GatewaySession:
    """State of one gateway.

    Attributes:
        link: None while it is disconnected.
        in_snapshot: requests in its snapshot so far; None once the snapshot is complete.
        release_timer: timer that releases its requests unless it reconnects.
        lost: it did not reconnect in time; retained for requests that may still run.
    """

    gateway_id: str
    link: Link | None = None
    in_snapshot: set[str] | None = None
    release_timer: asyncio.TimerHandle | None = None
    lost: bool = False

    def send(self, message: Message) -> None:
        """Send a message if the gateway is connected; its next snapshot reveals missed ones."""
        if self.link is not None:
            self.link.send(message)

    def note_in_snapshot(self, request_id: str) -> None:
        """Record that the snapshot that is being read contains the request."""
        if self.in_snapshot is not None:
            self.in_snapshot.add(request_id)


class SessionScheduler(Protocol):
    """Interface of the live scheduler that the sessions use; they read the requests of its core."""

    core: Scheduler

    def feed(self, event: Event) -> None:
        """Handle an event in the core, and execute its commands."""
        ...

    def now(self) -> float:
        """Return the time on the scheduler's clock."""
        ...

    def queue_timeout_s(self, priority: PriorityClass) -> float:
        """Return the default queue timeout of a class, in seconds."""
        ...

    def is_registered(self, replica_id: str) -> bool:
        """Return whether the replica is registered, so that a grant may name it."""
        ...

    def watch(self, request_id: str) -> None:
        """Send updates of a waiting request's outlook to its gateway."""
        ...

    def on_late_times(self, request_id: str, times: RequestTimes) -> None:
        """Add times that a gateway reports for a request that has already ended."""
        ...

    async def exposition(self) -> str:
        """Return the scheduler's metrics in the text format."""
        ...

    async def answer(self, query: str, arguments: bytes) -> bytes:
        """Answer an admin's query."""
        ...


class GatewaySessions:
    """All sessions with gateways: converts their messages to events, and the core's commands to messages."""

    def __init__(self, scheduler: SessionScheduler, grace_s: float) -> None:
        self._scheduler = scheduler
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._gateways: dict[str, GatewaySession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._orphan_detector = OrphanDetector(
            scheduler.core.requests,
            lambda gateway_id: gateway_id in self._gateways and self._gateways[gateway_id].lost,
        )
        self._on: dict[type[Message], Callable[[GatewaySession, Any], None]] = {
            Submit: self._on_submit,
            Running: self._on_running,
            SnapshotEnd: self._on_snapshot_end,
            PutBack: self._on_put_back,
            FirstToken: self._on_first_token,
            Finished: self._on_finish,
            Cancelled: self._on_cancel,
            Watch: self._on_watch,
            Scrape: self._on_scrape,
            GatewayPage: self._on_metrics,
            Query: self._on_query,
        }
        self._metrics = GatewayMetrics(self._links)

    def __repr__(self) -> str:
        return f"<GatewaySessions gateways {self.connected_count}>"

    # Called by the server.

    def on_join(self, gateway_id: str, link: Link) -> Callable[[Message], None]:
        """Begin a session, or a new connection of one; return the handler of its messages."""
        gateway = self._gateways.setdefault(gateway_id, GatewaySession(gateway_id))
        if gateway.release_timer is not None:
            gateway.release_timer.cancel()
            gateway.release_timer = None
        gateway.link, gateway.in_snapshot, gateway.lost = link, set(), False
        return partial(self._on_message, gateway)

    def _on_message(self, gateway: GatewaySession, message: Message) -> None:
        handler = self._on.get(type(message))
        if handler is None:
            text = f"gateway {gateway.gateway_id} sent an unexpected message: {type(message).__name__}"
            raise ChannelError(text)
        handler(gateway, message)

    def on_loss(self, gateway_id: str, link: Link, *, permanent: bool) -> None:
        """Handle the loss of a connection; `permanent` if the gateway sent `Bye`."""
        gateway = self._gateways.get(gateway_id)
        if gateway is None or gateway.link is not link:
            return
        gateway.link = None
        if permanent:
            self._remove_gateway(gateway)
        else:
            gateway.release_timer = self._loop.call_later(self._grace_s, self._on_grace_expired, gateway)

    # Called by the live scheduler.

    def grant(self, command: Dispatch, request: Request) -> None:
        """Send a grant to the request's gateway."""
        request.grants += 1
        self._send(command.gateway_id, Granted(request.grants, command))

    def revoke(self, command: Revoke) -> None:
        """Revoke the grant by which a request runs; a message that is lost is not repeated."""
        scheduled = self._scheduler.core.find(command.request_id)
        if scheduled is not None and scheduled.replica_id == command.replica_id:
            self._send(command.gateway_id, Revoked(command.request_id, scheduled.request.grants))

    def conclude(self, command: Conclude, event: Event) -> None:
        """Send the rejection of a request that waits; `event` led to it."""
        waits = not command.dispatched or isinstance(event, DispatchFailed)
        if waits and command.conclusion.outcome is not Outcome.CANCELLED:
            self._send(command.gateway_id, Rejected(command.request_id, command.conclusion))

    def reject_failed(self, event: Event, message: str) -> None:
        """Fail the waiting request of an event that the core could not handle.

        Otherwise its gateway would submit it to the next scheduler, which would fail in the same way.
        """
        request: Request | None = None
        if isinstance(event, Arrived):
            request = event.request
        elif isinstance(event, DispatchFailed):
            core = self._scheduler.core
            scheduled = core.find(event.request_id) or core.ended.get(event.request_id)
            request = None if scheduled is None else scheduled.request
        if request is not None:
            self._send(request.gateway_id, Rejected(request.request_id, Conclusion(Outcome.FAILED, message)))

    def on_report(self, event: ReplicaReported) -> list[str]:
        """Return the requests of lost gateways that have ended, by an engine's report."""
        if not self._orphan_detector.has_orphans:
            return []
        ended = self._orphan_detector.on_report(event.replica_id, event.report, self._scheduler.now())
        if not self._orphan_detector.has_orphans:
            self._remove_lost_gateways()
        return ended

    def send_outlooks(self, outlooks: Iterable[RequestOutlook]) -> None:
        """Send each gateway the outlooks of its waiting requests."""
        by_gateway: defaultdict[str, list[RequestOutlook]] = defaultdict(list)
        for outlook in outlooks:
            scheduled = self._scheduler.core.find(outlook.request_id)
            if scheduled is not None and scheduled.replica_id is None:
                by_gateway[scheduled.request.gateway_id].append(outlook)
        for gateway_id, entries in by_gateway.items():
            self._send(gateway_id, Outlooks(entries))

    def broadcast(self, message: Message) -> None:
        """Send a message to every connected gateway."""
        for gateway in self._gateways.values():
            gateway.send(message)

    @property
    def connected_count(self) -> int:
        """Number of connected gateways."""
        return sum(gateway.link is not None for gateway in self._gateways.values())

    # Handlers of gateways' messages.

    def _on_submit(self, gateway: GatewaySession, message: Submit) -> None:
        request_id = message.submission.request_id
        gateway.note_in_snapshot(request_id)
        scheduled = self._scheduler.core.find(request_id)
        if scheduled is None:
            self._scheduler.feed(Arrived(self._request(gateway, message)))
        elif (owner := scheduled.request.gateway_id) != gateway.gateway_id:
            text = f"request id {request_id} is in use by gateway {owner}"
            gateway.send(Rejected(request_id, Conclusion(Outcome.REJECTED_INVALID, text)))
        elif scheduled.replica_id is not None:
            self._reconcile_grant(gateway, scheduled, message)

    def _reconcile_grant(self, gateway: GatewaySession, scheduled: ScheduledRequest, message: Submit) -> None:
        """Reconcile a request that runs here and waits there, by rule 2."""
        request_id = message.submission.request_id
        grants, dispatch = scheduled.request.grants, scheduled.dispatch
        if message.grants < grants and dispatch is not None:
            if self._scheduler.is_registered(dispatch.replica_id):
                gateway.send(Granted(grants, dispatch))
            else:
                failure, text = DispatchFailure.UNREACHABLE, "the replica has disconnected"
                self._put_back(scheduled, PutBack(request_id, "", failure, text, grants))
        elif message.put_back is not None:
            self._put_back(scheduled, message.put_back)
        else:
            self._scheduler.feed(Cancelled(request_id))
            self._scheduler.feed(Arrived(self._request(gateway, message)))

    def _on_running(self, gateway: GatewaySession, message: Running) -> None:
        request_id = message.submission.request_id
        gateway.note_in_snapshot(request_id)
        scheduled = self._scheduler.core.find(request_id)
        if scheduled is not None:
            request = scheduled.request
            if request.gateway_id != gateway.gateway_id:
                gateways = f"{request.gateway_id} and {gateway.gateway_id}"
                raise ChannelError(f"request {request_id} is running on two gateways: {gateways}")
            if (scheduled.replica_id, request.grants) == (message.replica_id, message.grants):
                if message.started:
                    self._on_first_token(gateway, FirstToken(request_id))
                return
            self._scheduler.feed(Cancelled(request_id))
        request = self._request(gateway, message)
        self._scheduler.feed(Resumed(request, message.replica_id, message.started))

    def _on_snapshot_end(self, gateway: GatewaySession, _message: SnapshotEnd) -> None:
        in_snapshot, gateway.in_snapshot = gateway.in_snapshot, None
        if in_snapshot is None:
            raise ChannelError(f"gateway {gateway.gateway_id} ended a snapshot that it had not started")
        for request_id in self._ids_of(gateway):
            if request_id not in in_snapshot:
                self._scheduler.feed(Cancelled(request_id))

    def _on_put_back(self, gateway: GatewaySession, message: PutBack) -> None:
        scheduled = self._own(gateway, message.request_id)
        if scheduled is None:
            # The gateway waits for a grant or a rejection.
            text = f"request {message.request_id} is unknown to the scheduler"
            gateway.send(Rejected(message.request_id, Conclusion(Outcome.FAILED, text)))
        elif scheduled.replica_id is not None and scheduled.request.grants == message.grant:
            self._put_back(scheduled, message)

    def _on_first_token(self, gateway: GatewaySession, message: FirstToken) -> None:
        scheduled = self._own(gateway, message.request_id)
        if scheduled is not None and scheduled.replica_id is not None and not scheduled.started:
            self._scheduler.feed(message)

    def _on_finish(self, gateway: GatewaySession, message: Finished) -> None:
        scheduled = self._own(gateway, message.request_id)
        if scheduled is None:
            if message.times is not None:
                self._scheduler.on_late_times(message.request_id, message.times)
        elif scheduled.replica_id is not None:
            self._scheduler.feed(message)
        else:
            self._scheduler.feed(Cancelled(message.request_id))

    def _on_cancel(self, gateway: GatewaySession, message: Cancelled) -> None:
        if self._own(gateway, message.request_id) is not None:
            self._scheduler.feed(message)

    def _on_watch(self, gateway: GatewaySession, message: Watch) -> None:
        if self._own(gateway, message.request_id) is not None:
            self._scheduler.watch(message.request_id)

    def _on_scrape(self, gateway: GatewaySession, message: Scrape) -> None:
        self._start(self._expose(gateway, message))

    def _on_query(self, gateway: GatewaySession, message: Query) -> None:
        self._start(self._answer_query(gateway, message))

    def _on_metrics(self, gateway: GatewaySession, message: GatewayPage) -> None:
        self._metrics.on_metrics(gateway.gateway_id, message)

    # Internals.

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # In an empty context, because Ray Serve cancels a request's tasks with the request.
        task = self._loop.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_query(self, gateway: GatewaySession, query: Query) -> None:
        try:
            found = await self._scheduler.answer(query.name, query.arguments)
        except Exception as error:
            logger.exception("event=admin_query_failed name=%s", query.name)
            gateway.send(QueryResult(query.serial, b"", is_last=True, error=repr(error)))
            return
        if not found:
            reason = f"the answer to query {query.name!r} is empty"
            gateway.send(QueryResult(query.serial, b"", is_last=True, error=reason))
        for at in range(0, len(found), _PART_BYTES):
            end = at + _PART_BYTES
            gateway.send(QueryResult(query.serial, found[at:end], is_last=end >= len(found)))

    async def _expose(self, gateway: GatewaySession, scrape: Scrape) -> None:
        others: Iterable[str] = ()
        if scrape.with_gateways:
            own, others = await asyncio.gather(
                self._scheduler.exposition(), self._metrics.of_others(gateway.gateway_id)
            )
        else:
            own = await self._scheduler.exposition()
        # One by one, because together they might exceed a frame.
        for metrics in others:
            gateway.send(GatewayPage(scrape.serial, metrics))
        gateway.send(Exposition(scrape.serial, own))

    def _links(self) -> dict[str, Link]:
        return {each.gateway_id: each.link for each in self._gateways.values() if each.link is not None}

    def _send(self, gateway_id: str, message: Message) -> None:
        gateway = self._gateways.get(gateway_id)
        if gateway is not None:
            gateway.send(message)

    def _own(self, gateway: GatewaySession, request_id: str) -> ScheduledRequest | None:
        """Return a gateway's request; None if it is unknown or another gateway's."""
        scheduled = self._scheduler.core.find(request_id)
        is_own = scheduled is not None and scheduled.request.gateway_id == gateway.gateway_id
        return scheduled if is_own else None

    def _ids_of(self, gateway: GatewaySession) -> list[str]:
        requests = of_gateway(self._scheduler.core.requests, gateway.gateway_id)
        return [scheduled.request.request_id for scheduled in requests]

    def _put_back(self, scheduled: ScheduledRequest, message: PutBack) -> None:
        failure, text = message.failure, message.message
        stated = stated_context_limit(text) if failure is DispatchFailure.TOO_LONG else None
        replica_id, tokens = scheduled.replica_id, message.generated_tokens
        assert replica_id is not None, "only a running request waits again"
        self._scheduler.feed(
            DispatchFailed(
                message.request_id, replica_id, failure, text, stated, tokens, message.retry_after_s
            )
        )

    def _on_grace_expired(self, gateway: GatewaySession) -> None:
        """Release the requests of a gateway that did not reconnect in time, by rule 6."""
        if gateway.link is not None:
            return
        self._scheduler.feed(GatewayLost(gateway.gateway_id))
        if self._ids_of(gateway):
            gateway.lost = True
            self._orphan_detector.has_orphans = True
            gateway.release_timer = self._loop.call_later(_ORPHAN_TIMEOUT_S, self._remove_gateway, gateway)
        else:
            del self._gateways[gateway.gateway_id]

    def _remove_lost_gateways(self) -> None:
        for gateway in [each for each in self._gateways.values() if each.lost]:
            if gateway.release_timer is not None:
                gateway.release_timer.cancel()
            del self._gateways[gateway.gateway_id]

    def _remove_gateway(self, gateway: GatewaySession) -> None:
        """Remove a disconnected gateway with all of its requests."""
        if gateway.link is not None:
            return
        self._scheduler.feed(GatewayLost(gateway.gateway_id))
        for request_id in self._ids_of(gateway):
            self._scheduler.feed(Cancelled(request_id))
        self._gateways.pop(gateway.gateway_id, None)

    def _request(self, gateway: GatewaySession, message: Submit | Running) -> Request:
        default_timeout_s = self._scheduler.queue_timeout_s(message.submission.priority)
        return _as_request(gateway.gateway_id, message, self._scheduler.now(), default_timeout_s)


def _as_request(gateway_id: str, message: Submit | Running, now: float, default_timeout_s: float) -> Request:
    """Convert a submission to a request on the scheduler's clock.

    Raises:
        ChannelError: its age is invalid.
    """
    submission, age_s = message.submission, message.age_s
    waits = isinstance(message, Submit)
    if not 0 <= age_s < math.inf:
        raise ChannelError(f"invalid age of a request: {age_s} s")
    put_back = message.put_back if isinstance(message, Submit) else None
    failure = None if put_back is None else put_back.failure
    # As `timed_since` of `gateway_client`; the time since the put-back is short, and not known here.
    is_served = put_back is not None and put_back.failure.is_after_service(put_back.generated_tokens)
    timed_s = 0.0 if is_served else age_s
    timeout_s = default_timeout_s if submission.queue_timeout_s is None else submission.queue_timeout_s
    return Request(
        submission=submission,
        gateway_id=gateway_id,
        arrived_at=now - age_s,
        expires_at=now - timed_s + timeout_s,
        attempts=_attempts(message.grants if waits else message.grants - 1, failure),
        lost=failure is DispatchFailure.LOST,
        client_request_id=message.client_request_id,
        grants=message.grants,
    )


def _attempts(dispatches: int, failure: DispatchFailure | None) -> int:
    """Return the dispatches that count as failed. After a revocation none do, as most were revoked, too."""
    return 0 if failure is DispatchFailure.REVOKED else max(0, dispatches)
