"""Orphans: running requests of a lost gateway. They keep their holds until their engine has finished them.

A disconnected gateway may be dead; its engines then notice the closed connections and stop. It may also be
cut off or busy, and its requests continue. Only the engines know. So the capacity of these requests is
released as reports show that engines run fewer requests than hold capacity on them:

    ended = requests with a hold, granted long enough before the report to be in it - waiting - running

An engine counts sequences, of which a request may have several, and newer requests besides. Both lower
`ended`, so an orphan may hold capacity too long, until the engine is less busy, but never too short. Requests
of other gateways whose end is still in transit raise it briefly, so two consecutive checks must agree.
"""

from collections import Counter, defaultdict
from collections.abc import Callable

from serve_app.core.request import RequestTable
from serve_app.core.routing.replica import ReplicaReport

# A check visits all requests, so it is done once for many reports.
_CHECK_INTERVAL_S = 0.5
# A grant reaches its engine in milliseconds, and a report is at most some tenths of a second old.
_SETTLED_S = _CHECK_INTERVAL_S + 0.5


class OrphanDetector:
    """Detector of orphans that have ended; reports are needed only while `has_orphans`.

    Args:
        is_lost: returns whether a gateway is lost.
        cancel: ends a request.
    """

    def __init__(
        self, requests: RequestTable, is_lost: Callable[[str], bool], cancel: Callable[[str], None]
    ) -> None:
        self._requests = requests
        self._is_lost = is_lost
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
        for scheduled in self._requests:
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
            for request_id in request_ids[:agreed]:
                self._cancel(request_id)
