"""The scheduler's book of requests: which gateway holds each, and by which grant it runs.

Orphans are running requests of a gateway that is lost, charged until their engine is free of them.

A gateway that cannot be heard may be dead, and then its engines notice the closed connections and stop. It
may as well be cut off, or busy, and then its requests go on. Only the engines know. So the places of these
requests are given away as reports show that engines run fewer than are charged to them:

    ended = requests charged, granted long enough before the report to be in it - waiting - running

An engine counts sequences, of which a request may have several, and newer requests besides. Both make
`ended` smaller, so an orphan may be held too long, until the engine is less busy, but not too short. Requests
of other gateways whose end is on its way here make it larger for an instant, so two looks in a row must
agree.
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
    """One gateway.

    Attributes:
        link: None while it is away.
        mentioned: requests named in its snapshot so far; None once the snapshot is complete.
        release: will give its requests up, unless it comes back.
        lost: it has not come back in time, and is kept for what it may still have running.
    """

    gateway_id: str
    link: Link | None = None
    mentioned: set[str] | None = None
    release: asyncio.TimerHandle | None = None
    lost: bool = False

    def tell(self, message: Message) -> None:
        """Send the message, unless the gateway is away: its next snapshot will show what it missed."""
        if self.link is not None:
            self.link.send(message)

    def mention(self, request_id: str) -> None:
        """Note that the snapshot, if one is being read, names the request."""
        if self.mentioned is not None:
            self.mentioned.add(request_id)


@dataclass(slots=True, eq=False)
class GatewayRequest:
    """One request.

    Attributes:
        submission: as it came; the hashes of its prompt go with its end.
        grants: how many have been issued for it.
        client_request_id: the id that its client gave it; empty where it gave none.
        granted: the one that this scheduler issued and that it runs by.
        replica_id: where it runs; None while it waits.
        started: its answer has begun.
        granted_at: when it was granted, or found to run.
        usage: what the engine counted, once it is over.
        arrived_at: on the scheduler's clock.
        times: what its gateway tells for its receipt, once it is over.
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
        """Its class."""
        return self.submission.priority

    @property
    def tenant(self) -> str:
        """The tenant that is charged for it."""
        return self.submission.tenant

    @property
    def runs(self) -> bool:
        """Whether it has a grant."""
        return self.replica_id is not None

    def wait(self) -> str:
        """Take the grant back; return the replica that it was for."""
        replica_id = self.replica_id
        assert replica_id is not None, "only a running request waits again"
        self.granted, self.replica_id, self.started = None, None, False
        return replica_id


class RequestBook(dict[str, GatewayRequest]):
    """Records by request id."""

    def __repr__(self) -> str:
        running = sum(record.runs for record in self.values())
        return f"<RequestBook waiting {len(self) - running}, running {running}>"

    def own(self, gateway: GatewaySession, request_id: str) -> GatewayRequest | None:
        """Return a gateway's own request, None when it is unknown or another's."""
        record = self.get(request_id)
        return record if record is not None and record.gateway is gateway else None

    def ids_of(self, gateway: GatewaySession) -> list[str]:
        """All requests of one gateway."""
        return [request_id for request_id, record in self.items() if record.gateway is gateway]

    def waiting(self) -> Counter[PriorityClass]:
        """How many wait, by class."""
        return Counter(record.priority for record in self.values() if not record.runs)

    def in_flight(self) -> Counter[str]:
        """How many run, by replica."""
        return Counter(record.replica_id for record in self.values() if record.replica_id is not None)


def as_request(gateway_id: str, message: Submit | Running, now: float, default_timeout_s: float) -> Request:
    """Put a submission on the scheduler's clock.

    Raises:
        ChannelError: its age is no time.
    """
    submission, age_s = message.submission, message.age_s
    waits = isinstance(message, Submit)
    if not 0 <= age_s < math.inf:
        raise ChannelError(f"a request cannot be {age_s} s old")
    put_back = message.put_back if isinstance(message, Submit) else None
    timeout_s = default_timeout_s if submission.queue_timeout_s is None else submission.queue_timeout_s
    return Request(
        submission=submission,
        gateway_id=gateway_id,
        arrived_at=now - age_s,
        # From its arrival, however often it was dispatched meanwhile.
        expires_at=now - age_s + timeout_s,
        # The dispatch that it runs by is not one before this.
        attempts=message.grants if waits else max(0, message.grants - 1),
        lost=put_back is not None and put_back.failure is DispatchFailure.LOST,
    )


# A look goes through all requests once, so it is taken for many reports together.
_LOOK_S = 0.5
# A grant reaches its engine in milliseconds, and a report tells of some tenths of a second ago at most.
_SETTLED_S = _LOOK_S + 0.5


class Orphans:
    """Finds the orphans that have ended.

    Args:
        cancel: gives the place of a request back.

    Attributes:
        exist: whether there are any; until it is set, reports need not be told.
    """

    def __init__(self, book: RequestBook, cancel: Callable[[str], None]) -> None:
        self._book = book
        self._cancel = cancel
        # Since the last look.
        self._reports: dict[str, ReplicaReport] = {}
        # How many had ended at the last look and were not found to be orphans, by replica.
        self._ended: dict[str, int] = {}
        self._look_at = 0.0
        self.exist = False

    def on_report(self, replica_id: str, report: ReplicaReport, now: float) -> None:
        """Note a report; give back the places of orphans that have ended when it is time to look."""
        self._reports[replica_id] = report
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look(now)

    def _look(self, now: float) -> None:
        settled: Counter[str] = Counter()
        orphans: dict[str, list[str]] = defaultdict(list)
        for request_id, record in self._book.items():
            if record.replica_id is None:
                continue
            if record.gateway.lost:
                orphans[record.replica_id].append(request_id)
            settled[record.replica_id] += record.granted_at <= now - _SETTLED_S
        self.exist = bool(orphans)
        reports, self._reports = self._reports, {}
        before, self._ended = self._ended, {}
        for replica_id, request_ids in orphans.items():
            report = reports.get(replica_id)
            if report is None or report.waiting is None or report.running is None:
                # Without counts of its own nothing can be told from ours.
                continue
            ended = settled[replica_id] - report.waiting - report.running
            agreed = max(0, min(ended, before.get(replica_id, 0), len(request_ids)))
            self._ended[replica_id] = ended - agreed
            for request_id in request_ids[:agreed]:
                self._cancel(request_id)
