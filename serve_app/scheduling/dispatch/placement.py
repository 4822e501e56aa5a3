"""On which replica? By load first, then by what it has cached, with the prefill that is left there.

A request is as long as what is left to compute of it, and that differs from replica to replica. A long prompt
that is mostly cached on one replica is a short prefill there and a long one everywhere else, so prefill
isolation may let it go to that one while the others are closed to it.
"""

from dataclasses import dataclass

from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.prefix.affinity import PrefixAffinity, Wanted
from serve_app.routing.replica_state import Hold, PrefillClass, ReplicaState
from serve_app.scheduling.isolation.prefill_isolation import PrefillIsolation
from serve_app.scheduling.request import ScheduledRequest


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """What a head needs of a replica besides room for its prefill.

    Attributes:
        tokens: of the KV cache.
        needs_empty_engine_queue: the engine's own queue must be empty.
    """

    pool: str
    tokens: int
    needs_empty_engine_queue: bool


class Placement:
    """Chooses the replica for a request that is about to go."""

    def __init__(self, ledger: ReplicaLedger, isolation: PrefillIsolation, affinity: PrefixAffinity) -> None:
        self._ledger = ledger
        self.isolation = isolation
        self._affinity = affinity

    def choose(
        self, head: ScheduledRequest, by_load: ReplicaState | None, fit: PlacementQuery, now: float
    ) -> tuple[ReplicaState, Hold] | None:
        """The replica, and what to hold of it; None when nobody may take the request.

        Args:
            by_load: the best for its whole prefill; None when isolation or load lets none take that.
        """
        if by_load is None and not (head.prefill_class is not PrefillClass.SHORT and head.cached_tokens):
            return None
        estimate, waited_s = head.estimate, now - head.request.arrived_at

        def able(replica_id: str, prefill_tokens: int) -> ReplicaState | None:
            limits = self.isolation.limits(self._prefill_class(head, prefill_tokens), now, waited_s)
            replica = self._ledger.able(
                replica_id,
                fit.tokens,
                now,
                long_limits=limits,
                needs_empty_engine_queue=fit.needs_empty_engine_queue,
            )
            return replica if replica is not None and replica.spec.pool == fit.pool else None

        wanted = Wanted(head.request, estimate.expected_prompt_tokens, estimate.expected_output_tokens)
        placed = self._affinity.choose(by_load, wanted, able)
        if placed is None:
            return None
        prefill_class = self._prefill_class(head, placed.prefill_tokens)
        return placed.replica, Hold(fit.tokens, prefill_class, placed.prefill_tokens)

    def _prefill_class(self, head: ScheduledRequest, prefill_tokens: int) -> PrefillClass:
        if prefill_tokens >= head.estimate.expected_prompt_tokens:
            return head.prefill_class
        # Boundaries may have moved since it was let in, but what is cached only shortens it.
        return min(head.prefill_class, self.isolation.prefill_class(prefill_tokens))
