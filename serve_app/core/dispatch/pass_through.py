"""Pass-through: requests that bypass the scheduler, so that a deployment can compare both.

A hash of the request id selects the share of requests that is scheduled. Each other one goes immediately to
the replica with the fewest requests among those that can hold it, regardless of queue and load. The ledger
holds these requests, too, so the scheduler knows the load of its engines.
"""

import zlib

from serve_app.core.dispatch.dispatcher import DispatchChoice
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.replica_state import Hold
from serve_app.request import Request

_HASHES = 2**32


class PassThrough:
    """Selects the requests that bypass the scheduler, and their replicas."""

    def __init__(self, active_share: float, ledger: ReplicaLedger) -> None:
        self.active_share = active_share
        self._ledger = ledger

    def __repr__(self) -> str:
        return f"<PassThrough active_share={self.active_share:g}>"

    def change(self, active_share: float) -> None:
        """Schedule another share from now on. Queued requests are not affected."""
        self.active_share = active_share

    def selects(self, request: Request) -> bool:
        """Return whether a request bypasses the scheduler. All of its attempts get the same answer."""
        share = self.active_share
        return share < 1 and zlib.crc32(request.request_id.encode()) >= share * _HASHES

    def choice(self, scheduled: ScheduledRequest) -> DispatchChoice | None:
        """Return the dispatch of a bypassing request; None for others, and while no replica can hold it."""
        if not self.selects(scheduled.request):
            return None
        destination = scheduled.request.destination
        replica = min(
            (
                each
                for each in self._ledger
                if each.is_usable
                and each.spec.pool in scheduled.pools
                and destination.admits(each.spec.replica_id, each.spec.adapters)
            ),
            key=lambda each: (each.in_flight, each.order),
            default=None,
        )
        if replica is None:
            return None
        scheduled.bypassed = True
        estimate = scheduled.estimate
        tokens = min(estimate.expected_tokens, replica.spec.max_model_len)
        return DispatchChoice(
            scheduled, replica, Hold(tokens, scheduled.prefill_class, estimate.expected_prompt_tokens)
        )
