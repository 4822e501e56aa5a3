"""The open replicas of each pool, ordered by their capacity.

A replica is *open* if it may accept one more request. The best one for a request is found in amortised
constant time, unless the request excludes single replicas. Open replicas are in heaps, those with the most
free tokens first. A heap entry is valid only while its version is the replica's current one, and every change
of a replica's capacity creates a new version. The next search inserts the replicas that have changed since
the last one, in O(log replicas) each, so that several changes in between cost one insertion.

There is a heap for each pair of numbers of long and of longest prefills in flight, of which there are few.
A replica may be open to short requests and closed to longer ones, and short requests are served better
without a long prefill in flight. Each pair has two heaps: replicas with capacity for batch work, and the
others. If a request does not fit the first replica of a heap, it fits no other of that heap.
"""

import bisect
import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.core.routing.replica_state import ReplicaState
from serve_app.request import ANYWHERE, Destination

_Entry = tuple[int, int, int, ReplicaState]
"""Negative free tokens, order, version, and the replica."""
_Heap = list[_Entry]
_OTHERS, _BACKFILL = 0, 1
# Additional requests in flight that outweigh the copy of a LoRA adapter into GPU memory.
_MAX_EXTRA_IN_FLIGHT = 4


class ReplicasByAdapter:
    """The replicas of a ledger by the LoRA adapters that they list, including lost ones with holds."""

    def __init__(self) -> None:
        self._by_adapter: dict[str, dict[str, ReplicaState]] = {}

    def add(self, state: ReplicaState) -> None:
        """Add a replica, after it was added to the ledger or its adapters changed."""
        for adapter in state.spec.adapters:
            self._by_adapter.setdefault(adapter, {})[state.spec.replica_id] = state

    def remove(self, state: ReplicaState) -> None:
        """Remove a replica, before its adapters change or it is removed from the ledger."""
        for adapter in state.spec.adapters:
            replicas = self._by_adapter[adapter]
            del replicas[state.spec.replica_id]
            if not replicas:
                del self._by_adapter[adapter]

    def of(self, adapter: str) -> Collection[ReplicaState]:
        """Return the replicas that list an adapter."""
        replicas = self._by_adapter.get(adapter)
        return () if replicas is None else replicas.values()

    def __repr__(self) -> str:
        counts = {name: len(replicas) for name, replicas in self._by_adapter.items()}
        return f"<ReplicasByAdapter {counts}>"


class Backpressure(Protocol):
    """Decides whether a replica may be sent more requests."""

    def admits(self, replica: ReplicaState, now: float) -> bool:
        """Return whether the engine's queue and batch allow one more request."""

    def admits_backfill(self, replica: ReplicaState, now: float) -> bool:
        """Return whether one more batch request delays no other request."""

    def gates(self, replica: ReplicaState) -> bool:
        """Return whether the last report shows overload, given whether the replica was gated before."""


# Not frozen, because creation of a frozen one takes three times as long: there are several for each request.
@dataclass(slots=True)
class CapacityQuery:
    """The requirements of a request for a replica. Immutable by convention.

    Attributes:
        tokens: KV tokens; at most the pool's context limit, so that an idle replica always fits.
        headroom: KV tokens that must remain free (`dispatch.headroom`), except on an idle replica.
        long_limits: only replicas with fewer long prefills in flight: (), (long), or (long, longest).
        is_backfill: only replicas with capacity that other requests leave (`dispatch.backfill`).
        avoided: excluded replicas, because the request has failed there.
        quarantined: only replicas without another request in quarantine.
        destination: which replicas of the pool can serve it.
        at_once: only replicas whose engine begins it immediately.
    """

    pool: str
    tokens: int
    long_limits: tuple[int, ...] = ()
    is_backfill: bool = False
    avoided: frozenset[str] = frozenset()
    quarantined: bool = False
    destination: Destination = ANYWHERE
    headroom: int = 0
    at_once: bool = False

    @property
    def is_restricted(self) -> bool:
        """True if it excludes single replicas, so that the order of the heaps does not apply."""
        return self.destination is not ANYWHERE or self.quarantined or self.at_once or bool(self.avoided)

    def fits(self, free_tokens: int, state: ReplicaState) -> bool:
        """Return whether the request fits into the free tokens of a replica."""
        return self.tokens + (self.headroom if state.in_flight else 0) <= free_tokens

    def allows(self, long_prefills: tuple[int, int]) -> bool:
        """Return whether one more long prefill is within the limits."""
        limits = self.long_limits
        if not limits:
            return True
        return long_prefills[0] < limits[0] and (len(limits) == 1 or long_prefills[1] < limits[1])


class OpenReplicas:
    """The heaps of open replicas.

    Args:
        replicas: all replicas of the ledger by id; their number bounds the size of a heap.
    """

    def __init__(
        self, backpressure: Backpressure, replicas: Mapping[str, ReplicaState], by_adapter: ReplicasByAdapter
    ) -> None:
        self._backpressure = backpressure
        self._replicas = replicas
        self._by_adapter = by_adapter
        self._heaps: dict[str, list[tuple[tuple[int, int], tuple[_Heap, _Heap]]]] = {}
        # Replicas with a new version that is not in a heap, as keys.
        self._changed: dict[ReplicaState, None] = {}
        # Until the first query for batch work, no replica is checked for it, and all are in `_OTHERS`.
        self._had_backfill = False

    def is_open(self, state: ReplicaState, now: float) -> bool:
        """Return whether the replica may accept one more request, regardless of its free tokens."""
        return state.is_usable and not state.gated and self._backpressure.admits(state, now)

    def update(self, state: ReplicaState) -> None:
        """Mark a replica whose capacity has changed, for the next search."""
        state.version += 1
        self._changed[state] = None

    def _insert_changed(self, now: float) -> None:
        """Insert the changed replicas that are open."""
        for state in self._changed:
            if self.is_open(state, now):
                self._insert(state, now)
        self._changed.clear()

    def _insert(self, state: ReplicaState, now: float) -> None:
        heaps = self._heaps_of(state.spec.pool, state.limited_prefills)
        admits_backfill = self._had_backfill and self._backpressure.admits_backfill(state, now)
        heap = heaps[_BACKFILL if admits_backfill else _OTHERS]
        heapq.heappush(heap, (-state.free_tokens, state.order, state.version, state))
        if len(heap) > 64 and len(heap) > 4 * len(self._replicas):
            heap[:] = [entry for entry in heap if entry[2] == entry[3].version]
            heapq.heapify(heap)

    def best(self, query: CapacityQuery, now: float) -> ReplicaState | None:
        """Return the best replica for a request, preferring few long prefills, or None if it fits none."""
        if query.is_restricted:
            return self._best_restricted(query, now)
        if query.is_backfill and not self._had_backfill:
            self._had_backfill = True
            for state in self._replicas.values():
                self.update(state)
        if self._changed:
            self._insert_changed(now)
        for long_prefills, heaps in self._heaps.get(query.pool, ()):
            if (heaps[_BACKFILL] or heaps[_OTHERS]) and query.allows(long_prefills):
                entry = self._freest(heaps, now, backfill=query.is_backfill)
                if entry is not None and query.fits(-entry[0], entry[3]):
                    return entry[3]
        return None

    def fits(self, state: ReplicaState, query: CapacityQuery, now: float) -> bool:
        """Return whether this replica may accept a request."""
        return (
            state.spec.pool == query.pool
            and query.fits(state.free_tokens, state)
            and self.is_open(state, now)
            and query.allows(state.limited_prefills)
            and (not query.is_backfill or self._backpressure.admits_backfill(state, now))
            and not (query.quarantined and state.quarantined)
            and state.spec.replica_id not in query.avoided
            and query.destination.admits(state.spec.replica_id, state.spec.adapters)
            and (not query.at_once or state.begins_at_once)
        )

    def admits_backfill(self, state: ReplicaState, now: float) -> bool:
        """Return whether one more batch request delays no other request on a replica."""
        return self._backpressure.admits_backfill(state, now)

    def has_any(self, pool: str, now: float) -> bool:
        """Return whether any replica of `pool` is open."""
        if self._changed:
            self._insert_changed(now)
        for _, heaps in self._heaps.get(pool, ()):
            if (heaps[_BACKFILL] and self._top(heaps[_BACKFILL], now)) or (
                heaps[_OTHERS] and self._top(heaps[_OTHERS], now)
            ):
                return True
        return False

    def _heaps_of(self, pool: str, long_prefills: tuple[int, int]) -> tuple[_Heap, _Heap]:
        """Return the two heaps of a pair of numbers. The pairs of a pool are sorted."""
        pairs = self._heaps.setdefault(pool, [])
        for known, heaps in pairs:
            if known == long_prefills:
                return heaps
        added: tuple[_Heap, _Heap] = ([], [])
        bisect.insort(pairs, (long_prefills, added), key=lambda pair: pair[0])
        return added

    def _best_restricted(self, query: CapacityQuery, now: float) -> ReplicaState | None:
        """Return the best replica for a request that excludes single replicas."""
        destination = query.destination
        if destination.replica_id is not None:
            state = self._replicas.get(destination.replica_id)
            return state if state is not None and self.fits(state, query, now) else None
        if destination.adapter is None:
            return self._first_that_fits(query, now)
        candidates = self._by_adapter.of(destination.adapter)
        fitting = _prefer_warm(
            [state for state in candidates if self.fits(state, query, now)], destination.adapter
        )
        return min(
            fitting, key=lambda state: (state.limited_prefills, -state.free_tokens, state.order), default=None
        )

    def _first_that_fits(self, query: CapacityQuery, now: float) -> ReplicaState | None:
        """Return the first replica in the order of the heaps that the request may use."""
        self._insert_changed(now)
        for long_prefills, heaps in self._heaps.get(query.pool, ()):
            if not query.allows(long_prefills):
                continue
            entries = [*heaps[_BACKFILL], *heaps[_OTHERS]]
            heapq.heapify(entries)
            while entries and query.tokens <= -entries[0][0]:
                _, _, version, state = heapq.heappop(entries)
                if version == state.version and self.fits(state, query, now):
                    return state
        return None

    def _freest(self, heaps: tuple[_Heap, _Heap], now: float, *, backfill: bool = False) -> _Entry | None:
        best = self._top(heaps[_BACKFILL], now)
        if backfill or not heaps[_OTHERS]:
            return best
        other = self._top(heaps[_OTHERS], now)
        if best is None or other is None:
            return best or other
        # The order is unique, so replicas are never compared.
        return min(best, other)

    def _top(self, heap: _Heap, now: float) -> _Entry | None:
        while heap:
            entry = heap[0]
            state = entry[3]
            if entry[2] == state.version:
                if self.is_open(state, now):
                    return entry
                # Its pace has fallen since the insertion, and with it the allowed queue.
                state.version += 1
            heapq.heappop(heap)
        return None


def _prefer_warm(fitting: Sequence[ReplicaState], adapter: str) -> list[ReplicaState]:
    """Return replicas that used the LoRA adapter recently and are not clearly busier than others, else all.

    An engine lists more adapters than fit into its GPU memory. An adapter that was not used recently is
    copied there first, and evicts another one. That costs less than waiting behind many requests.
    """
    least = min((state.in_flight for state in fitting), default=0)
    warm = [
        state
        for state in fitting
        if adapter in state.recent_adapters and state.in_flight <= least + _MAX_EXTRA_IN_FLIGHT
    ]
    return warm or list(fitting)
