"""Placement: selects the replica for a request by load, speed, cached prefix and latency targets."""

import math
from dataclasses import replace

from serve_app.core.isolation import PrefillIsolation
from serve_app.core.latency_targets import LatencyTargets
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.open_replicas import CapacityQuery
from serve_app.core.routing.prefix.affinity import PrefixAffinity, PrefixQuery
from serve_app.core.routing.replica_state import Hold, PrefillClass, ReplicaState


class Placement:
    """Selects the replica for the request that is to be dispatched."""

    def __init__(
        self,
        ledger: ReplicaLedger,
        isolation: PrefillIsolation,
        affinity: PrefixAffinity,
        targets: LatencyTargets,
    ) -> None:
        self._ledger = ledger
        self.isolation = isolation
        self._affinity = affinity
        self._targets = targets

    def choose(
        self, head: ScheduledRequest, by_load: ReplicaState | None, query: CapacityQuery, now: float
    ) -> tuple[ReplicaState, Hold] | None:
        """Return the replica and what to hold there, or None if no replica may accept the request.

        Args:
            by_load: the best of like replicas for the whole prefill; None if isolation or load excludes all.
            query: requirements of the whole prefill.
        """
        if head.home is not None:
            return self._at_home(head, query, now)
        usual = self._usual(head, by_load, query, now)
        if usual is None or not self._targets.affects(head):
            return usual
        return self._by_target(head, usual, query, now)

    def _usual(
        self, head: ScheduledRequest, by_load: ReplicaState | None, query: CapacityQuery, now: float
    ) -> tuple[ReplicaState, Hold] | None:
        """Return the replica for a request without regard to latency targets, as `choose` does."""
        if by_load is None and not (head.prefill_class is not PrefillClass.SHORT and head.cached_tokens):
            return None
        if self._ledger.speeds.are_unlike(query.pool):
            placed = self._by_speed(head, query, now)
            if placed is not None:
                return placed
        estimate = head.estimate
        if by_load is not None and not head.request.submission.prefix:
            # No replica can have a part of the prompt cached.
            prompt_tokens = estimate.expected_prompt_tokens
            return by_load, Hold(query.tokens, head.prefill_class, prompt_tokens, query.quarantined)

        def admissible(replica_id: str, prefill_tokens: int) -> ReplicaState | None:
            return self._admissible(head, replica_id, prefill_tokens, query, now)

        prompt = PrefixQuery(head.request, estimate.expected_prompt_tokens)
        found = self._affinity.choose(by_load, prompt, admissible)
        if found is None:
            return None
        return found.replica, self._hold(head, found.prefill_tokens, query)

    def _by_target(
        self, head: ScheduledRequest, usual: tuple[ReplicaState, Hold], query: CapacityQuery, now: float
    ) -> tuple[ReplicaState, Hold]:
        """Return the usual replica, or the best of those on which all latency targets are met."""
        targets, hold = self._targets, usual[1]
        if targets.are_met(head, usual[0], hold.prefill_tokens, now):
            return usual
        prompt_tokens = head.estimate.expected_prompt_tokens
        best, least_s = usual, math.inf
        for replica in self._ledger.of_pool(query.pool):
            cached = self._affinity.cached_on(replica.spec.replica_id, head.request, prompt_tokens)
            left = prompt_tokens - cached
            if self._admissible(head, replica.spec.replica_id, left, query, now) is None:
                continue
            first_s = targets.first_token_s(replica, left)
            if first_s < least_s and targets.are_met(head, replica, left, now):
                best, least_s = (replica, self._hold(head, left, query)), first_s
        return best

    def _by_speed(
        self, head: ScheduledRequest, query: CapacityQuery, now: float
    ) -> tuple[ReplicaState, Hold] | None:
        """Return the best of unlike replicas that may accept the request; see `routing.speeds`."""
        speeds, estimate, fits = self._ledger.speeds, head.estimate, self._ledger.open.fits
        left: dict[ReplicaState, int] = {}
        for replica in self._ledger.of_pool(query.pool):
            replica_id, tokens = replica.spec.replica_id, estimate.expected_prompt_tokens
            if head.cached_tokens:
                tokens -= self._affinity.cached_on(replica_id, head.request, tokens)
            if fits(replica, query, now) or self._admissible(head, replica_id, tokens, query, now):
                left[replica] = tokens

        def completion(at: ReplicaState) -> tuple[float, int]:
            return speeds.completion(at, left[at], estimate.expected_output_tokens, now), at.order

        best = min(left, key=completion, default=None)
        if best is None:
            return None
        if head.cached_tokens and best.in_flight:
            best = min(left, key=lambda at: (speeds.cost(at, left[at], now), at.order))
        return best, self._hold(head, left[best], query)

    def _hold(self, head: ScheduledRequest, prefill_tokens: int, query: CapacityQuery) -> Hold:
        return Hold(
            query.tokens, self._prefill_class(head, prefill_tokens), prefill_tokens, query.quarantined
        )

    def _at_home(
        self, head: ScheduledRequest, query: CapacityQuery, now: float
    ) -> tuple[ReplicaState, Hold] | None:
        """Return the replica of the request's context, or None if it may not accept the request."""
        assert head.home is not None
        prefill_tokens = head.prefill_tokens
        replica = self._admissible(head, head.home, prefill_tokens, query, now)
        if replica is None:
            return None
        return replica, self._hold(head, prefill_tokens, query)

    def _admissible(
        self, head: ScheduledRequest, replica_id: str, prefill_tokens: int, query: CapacityQuery, now: float
    ) -> ReplicaState | None:
        """Return a replica if it may accept the request with so many tokens to compute, else None."""
        limits = self.isolation.limits(self._prefill_class(head, prefill_tokens), now)
        replica = self._ledger.get(replica_id)
        fits = replica is not None and self._ledger.open.fits(
            replica, replace(query, long_limits=limits), now
        )
        return replica if fits else None

    def _prefill_class(self, head: ScheduledRequest, prefill_tokens: int) -> PrefillClass:
        if prefill_tokens >= head.estimate.expected_prompt_tokens:
            return head.prefill_class
        # Boundaries may have changed since admission, but a cached prefix never raises the class.
        return min(head.prefill_class, self.isolation.prefill_class(prefill_tokens))
