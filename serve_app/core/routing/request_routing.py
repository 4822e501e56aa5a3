"""Request routing: the pools that may serve a request, or its rejection, on arrival and while it is queued.

Most requests may use any replica of several pools (`core.routing.pools`). A *bound* request refers to state
on one replica, such as an earlier response, and no other replica can serve it. It waits for that replica
alone. If the replica is not connected, it waits for a grace period, which covers a reconnecting
replica and a failover of the scheduler. After that it is rejected, because the state is lost with the
replica. The period begins with the loss for a request that ran there, and otherwise when the replica is first
found missing.

A request for a LoRA adapter goes to pools with a replica that lists the adapter. If there is none, it waits
for the same grace period, and is then rejected as a request for an unknown model.

Queued requests are routed again when the inputs of routing have changed. The inputs are the context limits
and outages of pools, `B_short`, and, for requests that only some replicas can serve, each replica that joins
or leaves. In a fleet of identical replicas one more makes no difference, so no request is routed again for
it.
"""

import math
from collections.abc import Iterator

from serve_app.core.admission.admission import Admission, too_long
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.pools import PoolRouter, least_budget_tokens
from serve_app.errors import Conclusion, Outcome
from serve_app.request import Destination, Request

Route = tuple[tuple[str, ...], Conclusion | None]
"""The pools of a request, the home pool first, and its rejection if it may not wait for them."""
Rejections = Iterator[tuple[ScheduledRequest, Conclusion]]
"""Yields queued requests that no pool can serve any more; the caller removes each."""


class RequestRouting:
    """Routes requests. `grace_s` is how long they wait for a missing replica or adapter."""

    def __init__(
        self,
        router: PoolRouter,
        admission: Admission,
        queue: RequestQueue,
        ledger: ReplicaLedger,
        grace_s: float,
    ) -> None:
        self._router = router
        self._admission = admission
        self._queue = queue
        self._ledger = ledger
        self._grace_s = grace_s
        # Required replicas and adapters that no connected replica provides, by the time of detection.
        self._missing_since: dict[Destination, float] = {}
        self._routed_by = self._inputs()

    def __repr__(self) -> str:
        return f"<RequestRouting {self._router} missing={list(self._missing_since)}>"

    def route(
        self,
        request: Request,
        estimate: TokenEstimate,
        now: float,
        above_tokens: int = 0,
        lost_at: float = math.inf,
    ) -> Route:
        """Return the pools that may serve a request, and its rejection if it may not wait for them.

        Args:
            above_tokens: longest context limit of the engines that rejected it as too long.
            lost_at: when the replica on which it ran was lost, if it was.
        """
        bound_to = request.bound_to
        if bound_to is not None:
            return self._route_bound(bound_to, request, estimate, now, above_tokens, lost_at)
        if request.spec.adapter is not None:
            return self._route_adapter(request.spec.adapter, request, estimate, now, above_tokens)
        pools = self._router.route(request, estimate, above_tokens=above_tokens)
        if not pools:
            return pools, too_long(request, estimate, self._router.longest_context())
        return pools, self._admission.outage_rejection(request, pools, now)

    def route_again(self, scheduled: ScheduledRequest, now: float, lost_at: float = math.inf) -> Route:
        """Return the route of a request that has been admitted; see `route`."""
        return self.route(
            scheduled.request, scheduled.estimate, now, scheduled.attempts.above_tokens, lost_at
        )

    def all_waiting(self, now: float) -> Rejections:
        """Route all queued requests again, and yield the rejected ones."""
        self._routed_by = self._inputs()
        for scheduled in list(self._queue):
            pools, rejection = self.route_again(scheduled, now)
            if rejection:
                yield scheduled, rejection
            elif pools != scheduled.pools:
                self._queue.reroute(scheduled, pools)

    def on_fleet_change(self, now: float) -> Rejections:
        """Route all again if a replica that joined or left affects any, and yield the rejected ones."""
        self._admission.outages.observe(self._ledger.has_alive, now)
        if self._queue.restricted or self._inputs() != self._routed_by:
            yield from self.all_waiting(now)

    def next_at(self) -> float | None:
        """Return the next end of a grace period for missing replicas, or None if there is none."""
        return min(self._missing_since.values()) + self._grace_s if self._missing_since else None

    def is_due(self, now: float) -> bool:
        """Return whether a grace period has ended, so that queued requests must be routed again."""
        next_at = self.next_at()
        return next_at is not None and now >= next_at

    def discard_ended(self, now: float) -> None:
        """Remove the ended grace periods after queued requests were routed again."""
        ended = [each for each, since in self._missing_since.items() if now >= since + self._grace_s]
        for missing in ended:
            del self._missing_since[missing]

    def _inputs(self) -> tuple[int, int]:
        return self._ledger.contexts.changes, self._admission.outages.changes

    def _route_bound(
        self,
        bound_to: str,
        request: Request,
        estimate: TokenEstimate,
        now: float,
        above_tokens: int,
        lost_at: float,
    ) -> Route:
        replica, order = self._ledger.get(bound_to), self._router.order()
        pool = "" if replica is None else replica.spec.pool
        if pool and pool not in order:
            # The replica drains or is lost: the redeployed application has no such pool any more.
            return order[-1:], _lost_response(bound_to)
        # The pool has no effect before the replica has joined. A replica known only from requests that an
        # earlier scheduler sent has no pool yet.
        pools = (pool,) if pool else order[-1:]
        if replica is None or not replica.joined:
            has_ended = self._grace_has_ended(Destination(bound_to), now, lost_at)
            rejection = self._admission.outage_rejection(request, pools, now)
            return pools, rejection or (_lost_response(bound_to) if has_ended else None)
        self._missing_since.pop(Destination(bound_to), None)
        is_too_long = least_budget_tokens(request, estimate) > replica.spec.max_model_len
        if is_too_long or replica.context_limit <= above_tokens:
            return pools, too_long(request, estimate, replica.context_limit)
        return pools, self._admission.outage_rejection(request, pools, now)

    def _route_adapter(
        self, adapter: str, request: Request, estimate: TokenEstimate, now: float, above_tokens: int
    ) -> Route:
        order = self._router.order()
        listing = [
            state
            for state in self._ledger.by_adapter.of(adapter)
            if state.joined and state.spec.pool in order
        ]
        routed = self._router.route(request, estimate, above_tokens=above_tokens)
        missing = Destination(adapter=adapter)
        if not listing:
            pools = routed or order[-1:]
            unknown = _unknown_adapter(adapter) if self._grace_has_ended(missing, now) else None
            return pools, self._admission.outage_rejection(request, pools, now) or unknown
        self._missing_since.pop(missing, None)
        listing_pools = {state.spec.pool for state in listing}
        least = least_budget_tokens(request, estimate)
        pools = tuple(pool for pool in routed if pool in listing_pools) or tuple(
            pool
            for pool in order
            if pool in listing_pools
            and max(least, above_tokens + 1) <= (self._ledger.context_limit(pool) or 0)
        )
        if not pools:
            return pools, too_long(request, estimate, max(state.context_limit for state in listing))
        return pools, self._admission.outage_rejection(request, pools, now)

    def _grace_has_ended(self, missing: Destination, now: float, lost_at: float = math.inf) -> bool:
        since = min(self._missing_since.get(missing, now), lost_at)
        if now >= since + self._grace_s:
            return True
        self._missing_since[missing] = since
        return False


def _unknown_adapter(adapter: str) -> Conclusion:
    return Conclusion(
        Outcome.REJECTED_UNKNOWN_MODEL,
        f"no engine lists the adapter {adapter[:100]!r}: load it, or request its base model",
    )


def _lost_response(replica_id: str) -> Conclusion:
    return Conclusion(
        Outcome.REJECTED_UNKNOWN_RESPONSE,
        f"the response that this request refers to was stored on replica {replica_id}, which is no longer "
        "available: send the whole conversation",
    )
