"""Placement: the replica for a request, by load and by how much of its prompt each replica has cached.

The length of a request is what is left to compute of its prompt, which differs between replicas. A long
prompt that is mostly cached on one replica is a short prefill there and a long one elsewhere. So prefill
isolation may admit it to that replica while it excludes the others.
"""

from dataclasses import replace

from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.open_replicas import CapacityQuery
from serve_app.routing.prefix.affinity import PrefixAffinity, PrefixQuery
from serve_app.routing.replica_state import Hold, PrefillClass, ReplicaState
from serve_app.scheduling.isolation.prefill_isolation import PrefillIsolation
from serve_app.scheduling.request import ScheduledRequest


class Placement:
    """Chooses the replica for a request that is about to be dispatched."""

    def __init__(self, ledger: ReplicaLedger, isolation: PrefillIsolation, affinity: PrefixAffinity) -> None:
        self._ledger = ledger
        self.isolation = isolation
        self._affinity = affinity

    def choose(
        self, head: ScheduledRequest, by_load: ReplicaState | None, query: CapacityQuery, now: float
    ) -> tuple[ReplicaState, Hold] | None:
        """The replica and what to hold of it; None when no replica may take the request.

        Args:
            by_load: the best for its whole prefill; None when isolation or load excludes all.
            query: what it needs with its whole prefill.
        """
        if by_load is None and not (head.prefill_class is not PrefillClass.SHORT and head.cached_tokens):
            return None
        estimate = head.estimate
        if by_load is not None and not head.request.submission.prefix:
            # Nothing of it can be cached anywhere.
            prompt_tokens = estimate.expected_prompt_tokens
            return by_load, Hold(query.tokens, head.prefill_class, prompt_tokens, query.quarantined)

        def admissible(replica_id: str, prefill_tokens: int) -> ReplicaState | None:
            limits = self.isolation.limits(self._prefill_class(head, prefill_tokens), now)
            replica = self._ledger.get(replica_id)
            fits = replica is not None and self._ledger.open.fits(
                replica, replace(query, long_limits=limits), now
            )
            return replica if fits else None

        prompt = PrefixQuery(head.request, estimate.expected_prompt_tokens, estimate.expected_output_tokens)
        found = self._affinity.choose(by_load, prompt, admissible)
        if found is None:
            return None
        prefill_class = self._prefill_class(head, found.prefill_tokens)
        return found.replica, Hold(query.tokens, prefill_class, found.prefill_tokens, query.quarantined)

    def _prefill_class(self, head: ScheduledRequest, prefill_tokens: int) -> PrefillClass:
        if prefill_tokens >= head.estimate.expected_prompt_tokens:
            return head.prefill_class
        # Boundaries may have changed since its admission, but a cached prefix only shortens it.
        return min(head.prefill_class, self.isolation.prefill_class(prefill_tokens))
