"""Orphans: running requests of a gateway that is lost, charged until their engine is free of them.

A gateway that cannot be heard may be dead, and then its engines notice the closed connections and stop. It
may as well be cut off, or busy, and then its requests go on. Only the engines know. So the places of these
requests are given away as reports show that engines run fewer than are charged to them:

    ended = requests charged, granted long enough before the report to be in it - waiting - running

An engine counts sequences, of which a request may have several, and newer requests besides. Both make
`ended` smaller, so an orphan may be held too long, until the engine is less busy, but not too short. Requests
of other gateways whose end is on its way here make it larger for an instant, so two looks in a row must
agree.
"""

from collections import Counter, defaultdict
from collections.abc import Callable

from serve_app.routing.replica import ReplicaReport
from serve_app.serving.channel.requests.request_book import RequestBook

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
