"""Requests that bypass the scheduler, so that a deployment can compare both ways.

A share of the requests is scheduled, chosen by a hash of their ids. The others go at once to the replica with
the fewest requests among those that can hold them, whatever waits and however busy it is. They are held in
the ledger like all others, so the scheduler knows what its engines do.
"""

import zlib

from serve_app.core.dispatch.dispatcher import Choice
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.replica_state import Hold
from serve_app.request import Request

_HASHES = 2**32


class PassThrough:
    """Chooses who is not scheduled, and where they go.

    Attributes:
        active_share: of the requests, which are scheduled.
    """

    def __init__(self, active_share: float, ledger: ReplicaLedger) -> None:
        self.active_share = active_share
        self._ledger = ledger

    def __repr__(self) -> str:
        return f"<PassThrough active_share={self.active_share:g}>"

    def change(self, active_share: float) -> None:
        """Schedule another share from now on; requests that wait are not concerned."""
        self.active_share = active_share

    def concerns(self, request: Request) -> bool:
        """Whether a request is not scheduled; the same for all of its attempts."""
        share = self.active_share
        return share < 1 and zlib.crc32(request.request_id.encode()) >= share * _HASHES

    def choice(self, scheduled: ScheduledRequest) -> Choice | None:
        """Where a request goes that is not scheduled; None for others, and while no replica can take it."""
        if not self.concerns(scheduled.request):
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
        scheduled.passed = True
        estimate = scheduled.estimate
        tokens = min(estimate.expected_tokens, replica.spec.max_model_len)
        return Choice(
            scheduled, replica, Hold(tokens, scheduled.prefill_class, estimate.expected_prompt_tokens)
        )
