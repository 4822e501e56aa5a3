"""The scheduler's record of requests: the gateway that holds each, and the grant by which it runs.

Orphans are running requests of a lost gateway. They keep their holds until their engine has finished them.

A disconnected gateway may be dead; its engines then notice the closed connections and stop. It may also be
cut off or busy, and its requests continue. Only the engines know. So the capacity of these requests is
released as reports show that engines run fewer requests than hold capacity on them:

    ended = requests with a hold, granted long enough before the report to be in it - waiting - running

An engine counts sequences, of which a request may have several, and newer requests besides. Both lower
`ended`, so an orphan may hold capacity too long, until the engine is less busy, but never too short. Requests
of other gateways whose end is still in transit raise it briefly, so two consecutive checks must agree.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.events import DispatchFailure
from serve_app.core.routing.replica import ReplicaReport
from serve_app.errors import ChannelError
from serve_app.request import PriorityClass, Request, Submission, Usage
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import Granted, Message, Running, Submit
from serve_app.serving.channel.scheduler_client import RequestTimes


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


@dataclass(slots=True, eq=False)
class GatewayRequest:
    """State of one request.

    Attributes:
        submission: as received; the hashes of its prompt are dropped at its end.
        grants: number of grants issued.
        client_request_id: id chosen by the client; empty for none.
        granted: grant of this scheduler by which it runs.
        replica_id: replica on which it runs; None while it waits.
        started: its answer has begun.
        granted_at: when it was granted, or found to be running.
        usage: the engine's token counts, after its end.
        arrived_at: arrival on the scheduler's clock.
        times: the gateway's times for the receipt, after its end.
    """

    gateway: GatewaySession
    submission: Submission
    grants: int
    client_request_id: str = ""
    granted: Granted | None = None
    replica_id: str | None = None
    started: bool = False
    granted_at: float = 0.0
    usage: Usage | None = None
    arrived_at: float = 0.0
    times: RequestTimes | None = None

    @property
    def priority(self) -> PriorityClass:
        """Priority class."""
        return self.submission.priority

    @property
    def tenant(self) -> str:
        """Tenant that is charged."""
        return self.submission.tenant

    @property
    def is_running(self) -> bool:
        """True if it has a grant."""
        return self.replica_id is not None

    def release_grant(self) -> str:
        """Withdraw the grant, and return its replica."""
        replica_id = self.replica_id
        assert replica_id is not None, "only a running request waits again"
        self.granted, self.replica_id, self.started = None, None, False
        return replica_id


class RequestBook(dict[str, GatewayRequest]):
    """Requests by id."""

    def __repr__(self) -> str:
        running = sum(record.is_running for record in self.values())
        return f"<RequestBook waiting {len(self) - running}, running {running}>"

    def own(self, gateway: GatewaySession, request_id: str) -> GatewayRequest | None:
        """Return a gateway's request; None if it is unknown or another gateway's."""
        record = self.get(request_id)
        return record if record is not None and record.gateway is gateway else None

    def ids_of(self, gateway: GatewaySession) -> list[str]:
        """Return the ids of a gateway's requests."""
        return [request_id for request_id, record in self.items() if record.gateway is gateway]

    def waiting(self) -> Counter[PriorityClass]:
        """Return the number of waiting requests by class."""
        return Counter(record.priority for record in self.values() if not record.is_running)

    def in_flight(self) -> Counter[str]:
        """Return the number of running requests by replica."""
        return Counter(record.replica_id for record in self.values() if record.replica_id is not None)


def as_request(gateway_id: str, message: Submit | Running, now: float, default_timeout_s: float) -> Request:
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
    # As in `PendingRequest.timed_since`; the time since the put-back is short, and not known here.
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
    )


def _attempts(dispatches: int, failure: DispatchFailure | None) -> int:
    """Return the dispatches that count as failed. After a revocation none do, as most were revoked, too."""
    return 0 if failure is DispatchFailure.REVOKED else max(0, dispatches)


# A check visits all requests, so it is done once for many reports.
_CHECK_INTERVAL_S = 0.5
# A grant reaches its engine in milliseconds, and a report is at most some tenths of a second old.
_SETTLED_S = _CHECK_INTERVAL_S + 0.5


class OrphanDetector:
    """Detector of orphans that have ended; reports are needed only while `has_orphans`."""

    def __init__(self, book: RequestBook, cancel: Callable[[str], None]) -> None:
        self._book = book
        self._cancel = cancel
        # Last report of each replica since the last check.
        self._reports: dict[str, ReplicaReport] = {}
        # Ended requests of the last check that were not attributed to orphans, by replica.
        self._ended: dict[str, int] = {}
        self._check_at = 0.0
        self.has_orphans = False

    def on_report(self, replica_id: str, report: ReplicaReport, now: float) -> None:
        """Record a report, and at intervals release the capacity of orphans that have ended."""
        self._reports[replica_id] = report
        if now >= self._check_at:
            self._check_at = now + _CHECK_INTERVAL_S
            self._check(now)

    def _check(self, now: float) -> None:
        settled: Counter[str] = Counter()
        orphans: dict[str, list[str]] = defaultdict(list)
        for request_id, record in self._book.items():
            if record.replica_id is None:
                continue
            if record.gateway.lost:
                orphans[record.replica_id].append(request_id)
            settled[record.replica_id] += record.granted_at <= now - _SETTLED_S
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
            for request_id in request_ids[:agreed]:
                self._cancel(request_id)
