"""Rerouting: waiting requests get other pools, or are refused, when what they were routed by has changed.

That is any context limit of a pool, which pools are out, `B_short`, and for a request that only some replicas
will do for, each replica that comes or goes. In a fleet of like replicas one more makes no difference, so
nobody is routed again for it, however many wait.
"""

from collections.abc import Iterator

from serve_app.errors import Conclusion
from serve_app.routing.ledger import ReplicaLedger
from serve_app.scheduling.admission.outages import Outages
from serve_app.scheduling.queueing.request_queue import RequestQueue
from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.request_routing import RequestRouting

Refused = Iterator[tuple[ScheduledRequest, Conclusion]]
"""Waiting requests that no pool can take any more, one after the other; the caller removes each."""


class Rerouting:
    """Routes the waiting requests of one model again."""

    def __init__(
        self, queue: RequestQueue, routing: RequestRouting, ledger: ReplicaLedger, outages: Outages
    ) -> None:
        self._queue = queue
        self._routing = routing
        self._ledger = ledger
        self._outages = outages
        self._routed_by = self._inputs()

    def __repr__(self) -> str:
        return f"<Rerouting {self._ledger.contexts}>"

    def all_waiting(self, now: float) -> Refused:
        """Route all of them, and yield those that are refused."""
        self._routed_by = self._inputs()
        for scheduled in list(self._queue):
            pools, refusal = self._routing.route_again(scheduled, now)
            if refusal:
                yield scheduled, refusal
            elif pools != scheduled.pools:
                self._queue.reroute(scheduled, pools)

    def on_fleet_change(self, now: float) -> Refused:
        """The same if a replica that has come or gone makes a difference to any of them."""
        self._outages.observe(self._ledger.has_alive, now)
        if self._queue.particular or self._inputs() != self._routed_by:
            yield from self.all_waiting(now)

    def _inputs(self) -> tuple[int, int]:
        return self._ledger.contexts.changes, self._outages.changes
