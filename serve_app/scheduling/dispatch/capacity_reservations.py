"""How does a request get in that fits nowhere, while smaller ones take each bit of room as it comes free?

A promoted request (`promotion`) whose KV cache fits no replica of its pool has room kept for it: the replica
that lacks least takes nobody else who would need what it lacks, until enough has ended there. One request of
each pool at a time has that right, for as long as it waits. What it costs is the room that stands empty
meanwhile. The bounded rate of promotions bounds that, and none are saved up while room is kept.

Ours. The idea is that of a reservation under backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.replica_state import ReplicaState
from serve_app.scheduling.request import ScheduledRequest


@dataclass(slots=True)
class Reservation:
    """Room that is kept on one replica."""

    scheduled: ScheduledRequest
    replica: ReplicaState
    tokens: int


class Reservations:
    """At most one for each pool."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger
        self._kept: dict[str, Reservation] = {}

    def __repr__(self) -> str:
        kept = {each.scheduled.request.request_id: each.replica.spec.replica_id for each in self}
        return f"<Reservations {kept}>"

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._kept.values())

    def of(self, pool: str) -> Reservation | None:
        """The one of a pool."""
        return self._kept.get(pool)

    def prune(self, now: float) -> None:
        """Drop those of requests that do not wait any more."""
        for pool, kept in list(self._kept.items()):
            if not kept.scheduled.queued or kept.scheduled.pools[:1] != (pool,):
                self._drop(pool, now)

    def lift(self, pool: str, now: float) -> ScheduledRequest | None:
        """Count what is kept as free, to see whether it suffices now; whose it is."""
        kept = self._kept.get(pool)
        if kept is None:
            return None
        self._ledger.reserve(kept.replica, 0, now)
        return kept.scheduled

    def keep(self, scheduled: ScheduledRequest, pool: str, tokens: int, now: float) -> None:
        """Keep that many tokens for a request, where it had them before or where least is lacking.

        The one that the pool had before, of another request, is dropped.
        """
        kept = self._kept.get(pool)
        if kept is None or kept.scheduled is not scheduled or not self._ledger.is_usable(kept.replica):
            replica = self._ledger.roomiest(pool)
            if kept is not None:
                self._drop(pool, now)
            if replica is None:
                return
            kept = self._kept[pool] = Reservation(scheduled, replica, tokens)
        kept.tokens = tokens
        self._ledger.reserve(kept.replica, tokens, now)

    def on_dispatch(self, scheduled: ScheduledRequest, now: float) -> bool:
        """A request has gone, and needs no room any more; whether some was kept for it."""
        pools = [pool for pool, kept in self._kept.items() if kept.scheduled is scheduled]
        for pool in pools:
            self._drop(pool, now)
        return bool(pools)

    def _drop(self, pool: str, now: float) -> None:
        self._ledger.reserve(self._kept.pop(pool).replica, 0, now)
