"""Request routing: the pools that a request may go to, or why it may not even wait for them.

Most requests may go to any replica of several pools (`routing.pools`). A *bound* request refers to what one
replica keeps, such as an earlier response, and no other can serve it. It waits for that replica alone. While
the replica is not connected it waits for a grace period, which covers one that reconnects and the start of
another scheduler. After that it is refused: what it refers to is gone with the replica.
"""

from serve_app.errors import Conclusion, Outcome
from serve_app.request import Request
from serve_app.routing.estimation.estimate import TokenEstimate
from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.pools import PoolRouter, least_budget_tokens
from serve_app.scheduling.admission.admission import Admission, too_long
from serve_app.scheduling.request import ScheduledRequest

Route = tuple[tuple[str, ...], Conclusion | None]
"""The pools of a request, its home first, and its refusal where it may not wait for them."""


class RequestRouting:
    """Routes the requests of one model.

    Args:
        grace_s: how long a bound request waits for a replica that is not connected.
    """

    def __init__(
        self, router: PoolRouter, admission: Admission, ledger: ReplicaLedger, grace_s: float
    ) -> None:
        self._router = router
        self._admission = admission
        self._ledger = ledger
        self._grace_s = grace_s
        # Replicas that some request is bound to and that are not connected, by the time that was noticed.
        self._missing_since: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<RequestRouting {self._router} missing={sorted(self._missing_since)}>"

    def route(self, request: Request, estimate: TokenEstimate, now: float, above_tokens: int = 0) -> Route:
        """Where a request may go.

        Args:
            above_tokens: context limit of the longest engine that refused it as too long.
        """
        bound_to = request.bound_to
        if bound_to is not None:
            return self._route_bound(bound_to, request, estimate, now, above_tokens)
        pools = self._router.route(request, estimate, above_tokens=above_tokens)
        if not pools:
            return pools, too_long(request, estimate, self._router.longest_context())
        return pools, self._admission.refuse_outage(request, pools, now)

    def route_again(self, scheduled: ScheduledRequest, now: float) -> Route:
        """The same for a request that has been admitted."""
        return self.route(scheduled.request, scheduled.estimate, now, scheduled.above_tokens)

    def next_at(self) -> float | None:
        """When requests have to be refused because their replica has not come back; None while none wait."""
        first = min(self._missing_since.values(), default=None)
        return None if first is None else first + self._grace_s

    def is_due(self, now: float) -> bool:
        """Whether that time has come: waiting requests have to be routed again."""
        next_at = self.next_at()
        return next_at is not None and now >= next_at

    def forget_overdue(self, now: float) -> None:
        """All that wait have been routed again: who comes now for such a replica begins a new grace."""
        overdue = [each for each, since in self._missing_since.items() if now >= since + self._grace_s]
        for replica_id in overdue:
            del self._missing_since[replica_id]

    def _route_bound(
        self, bound_to: str, request: Request, estimate: TokenEstimate, now: float, above_tokens: int
    ) -> Route:
        replica = self._ledger.get(bound_to)
        if replica is None or not replica.joined:
            # Where it waits does not matter: it goes nowhere before its replica is there.
            pools = self._router.order()[-1:] if replica is None else (replica.spec.pool,)
            since = self._missing_since.setdefault(bound_to, now)
            gone = _gone(bound_to) if now >= since + self._grace_s else None
            return pools, self._admission.refuse_outage(request, pools, now) or gone
        self._missing_since.pop(bound_to, None)
        pools = (replica.spec.pool,)
        is_too_long = least_budget_tokens(request, estimate) > replica.spec.max_model_len
        if is_too_long or replica.context_limit <= above_tokens:
            return pools, too_long(request, estimate, replica.context_limit)
        return pools, self._admission.refuse_outage(request, pools, now)


def _gone(replica_id: str) -> Conclusion:
    return Conclusion(
        Outcome.REJECTED_UNKNOWN_RESPONSE,
        f"what this request refers to was kept by replica {replica_id} alone, which is gone: send the whole "
        "conversation",
    )
