"""Rerouting: queued requests get other pools, or are rejected, when the inputs of their routing have changed.

The inputs are the context limits and outages of pools, `B_short`, and, for requests that only some replicas
can serve, each replica that joins or leaves. In a fleet of identical replicas one more makes no difference,
so no request is routed again for it.
"""

from collections.abc import Iterator

from serve_app.core.admission.outages import Outages
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.request_routing import RequestRouting
from serve_app.errors import Conclusion

Rejections = Iterator[tuple[ScheduledRequest, Conclusion]]
"""Yields queued requests that no pool can serve any more; the caller removes each."""


class Rerouting:
    """Routes the queued requests of one model again."""

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

    def all_waiting(self, now: float) -> Rejections:
        """Route all queued requests, and yield the rejected ones."""
        self._routed_by = self._inputs()
        for scheduled in list(self._queue):
            pools, rejection = self._routing.route_again(scheduled, now)
            if rejection:
                yield scheduled, rejection
            elif pools != scheduled.pools:
                self._queue.reroute(scheduled, pools)

    def on_fleet_change(self, now: float) -> Rejections:
        """Route all again if a replica that joined or left affects any, and yield the rejected ones."""
        self._outages.observe(self._ledger.has_alive, now)
        if self._queue.restricted or self._inputs() != self._routed_by:
            yield from self.all_waiting(now)

    def _inputs(self) -> tuple[int, int]:
        return self._ledger.contexts.changes, self._outages.changes
