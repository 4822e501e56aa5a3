"""The open replicas of each pool, ordered so that the best one for a request is found in O(1).

A replica is *open* when it may take one more request. Open replicas are in heaps, those with the most free
tokens first. A heap entry is valid only while its version is the replica's, and every change of a replica's
capacity gives it a new version. An update costs O(log replicas).

There is a heap for each pair of numbers of long and of longest prefills in flight, of which there are few. A
replica may be open to short requests and closed to longer ones, and short requests do better where no long
prefill is under way. Each pair has two heaps: replicas whose engine queue is empty, and the others, since
some requests need an empty one. No replica of a heap fits a request that the heap's first does not fit.
"""

import bisect
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.request import ANYWHERE, Destination
from serve_app.routing.adapter_holders import AdapterHolders
from serve_app.routing.replica_state import ReplicaState

_Entry = tuple[int, int, int, ReplicaState]
"""Free tokens, negative; order of joining; version; the replica."""
_Heap = list[_Entry]
_QUEUED, _EMPTY = 0, 1
# Requests in flight that the copy of a LoRA adapter into GPU memory is worth.
_MOST_AHEAD = 4


class Backpressure(Protocol):
    """Decides when a replica may be sent more."""

    def admits(self, replica: ReplicaState, now: float) -> bool:
        """Whether one more request may be sent, as far as the engine's queue and batch go."""

    def has_empty_queue(self, replica: ReplicaState) -> bool:
        """Whether the engine's own queue is empty, or nearly so."""

    def gates(self, replica: ReplicaState) -> bool:
        """Whether the last report, and whether it was gated before, show that it is too busy."""


# Not frozen, which would take three times as long to make: there are several for each request.
@dataclass(slots=True)
class CapacityQuery:
    """What a request needs of a replica. Nobody changes one.

    Attributes:
        tokens: KV tokens; at most the pool's context limit, so that an idle replica always fits.
        long_limits: only replicas with fewer prefills in flight than these: (), (long), or (long, longest).
        needs_empty_engine_queue: only replicas whose engine's queue is empty.
        avoided: replicas that are out of the question, because the request has failed there.
        quarantined: only replicas without another request in quarantine.
        destination: which replicas of the pool will do at all.
    """

    pool: str
    tokens: int
    long_limits: tuple[int, ...] = ()
    needs_empty_engine_queue: bool = False
    avoided: frozenset[str] = frozenset()
    quarantined: bool = False
    destination: Destination = ANYWHERE

    @property
    def is_choosy(self) -> bool:
        """Whether it excludes single replicas, so that the order of the heaps does not answer it."""
        return self.destination is not ANYWHERE or self.quarantined or bool(self.avoided)

    def allows(self, long_prefills: tuple[int, int]) -> bool:
        """Whether one more long prefill beside these is within the limits."""
        limits = self.long_limits
        if not limits:
            return True
        return long_prefills[0] < limits[0] and (len(limits) == 1 or long_prefills[1] < limits[1])


class OpenReplicas:
    """The heaps of open replicas.

    Args:
        replicas: all replicas of the ledger, by id; it bounds the size of a heap.
        holders: which of them list which adapters.
    """

    def __init__(
        self, backpressure: Backpressure, replicas: Mapping[str, ReplicaState], holders: AdapterHolders
    ) -> None:
        self._backpressure = backpressure
        self._replicas = replicas
        self._holders = holders
        self._heaps: dict[str, list[tuple[tuple[int, int], tuple[_Heap, _Heap]]]] = {}

    def is_open(self, state: ReplicaState, now: float) -> bool:
        """Whether the replica may take one more request, its free tokens apart."""
        return state.is_usable and not state.gated and self._backpressure.admits(state, now)

    def update(self, state: ReplicaState, now: float) -> None:
        """Insert a replica again after its capacity has changed; it is left out while it is not open."""
        state.version += 1
        if not self.is_open(state, now):
            return
        heaps = self._heaps_of(state.spec.pool, state.long_prefills)
        heap = heaps[_EMPTY if self._backpressure.has_empty_queue(state) else _QUEUED]
        heapq.heappush(heap, (-state.free_tokens, state.order, state.version, state))
        if len(heap) > 64 and len(heap) > 4 * len(self._replicas):
            heap[:] = [entry for entry in heap if entry[2] == entry[3].version]
            heapq.heapify(heap)

    def best(self, query: CapacityQuery, now: float) -> ReplicaState | None:
        """The best replica for a request, few long prefills first; None when it fits none."""
        if query.is_choosy:
            return self._best_of_some(query, now)
        for long_prefills, heaps in self._heaps.get(query.pool, ()):
            if (heaps[_EMPTY] or heaps[_QUEUED]) and query.allows(long_prefills):
                entry = self._freest(heaps, now, empty=query.needs_empty_engine_queue)
                if entry is not None and query.tokens <= -entry[0]:
                    return entry[3]
        return None

    def fits(self, state: ReplicaState, query: CapacityQuery, now: float) -> bool:
        """Whether this replica may take a request."""
        return (
            state.spec.pool == query.pool
            and query.tokens <= state.free_tokens
            and self.is_open(state, now)
            and query.allows(state.long_prefills)
            and (not query.needs_empty_engine_queue or self._backpressure.has_empty_queue(state))
            and not (query.quarantined and state.quarantined)
            and state.spec.replica_id not in query.avoided
            and query.destination.admits(state.spec.replica_id, state.spec.adapters)
        )

    def has_empty_queue(self, state: ReplicaState) -> bool:
        """Whether the queue of a replica's engine is empty, or nearly so."""
        return self._backpressure.has_empty_queue(state)

    def has_any(self, pool: str, now: float) -> bool:
        """Whether any replica of `pool` is open."""
        for _, heaps in self._heaps.get(pool, ()):
            if (heaps[_EMPTY] and self._top(heaps[_EMPTY], now)) or (
                heaps[_QUEUED] and self._top(heaps[_QUEUED], now)
            ):
                return True
        return False

    def _heaps_of(self, pool: str, long_prefills: tuple[int, int]) -> tuple[_Heap, _Heap]:
        """The two heaps of a pair of numbers; all pairs of a pool stand in their order."""
        pairs = self._heaps.setdefault(pool, [])
        for known, heaps in pairs:
            if known == long_prefills:
                return heaps
        made: tuple[_Heap, _Heap] = ([], [])
        bisect.insort(pairs, (long_prefills, made), key=lambda pair: pair[0])
        return made

    def _best_of_some(self, query: CapacityQuery, now: float) -> ReplicaState | None:
        """The same for the few requests that exclude single replicas."""
        wanted = query.destination
        if wanted.replica_id is not None:
            state = self._replicas.get(wanted.replica_id)
            return state if state is not None and self.fits(state, query, now) else None
        if wanted.adapter is None:
            return self._first_that_fits(query, now)
        holders = self._holders.of(wanted.adapter)
        fitting = _where_warm([state for state in holders if self.fits(state, query, now)], wanted.adapter)
        return min(
            fitting, key=lambda state: (state.long_prefills, -state.free_tokens, state.order), default=None
        )

    def _first_that_fits(self, query: CapacityQuery, now: float) -> ReplicaState | None:
        """In the order of the heaps, past the replicas that a request is not to go to."""
        for long_prefills, heaps in self._heaps.get(query.pool, ()):
            if not query.allows(long_prefills):
                continue
            entries = [*heaps[_EMPTY], *heaps[_QUEUED]]
            heapq.heapify(entries)
            while entries and query.tokens <= -entries[0][0]:
                _, _, version, state = heapq.heappop(entries)
                if version == state.version and self.fits(state, query, now):
                    return state
        return None

    def _freest(self, heaps: tuple[_Heap, _Heap], now: float, *, empty: bool = False) -> _Entry | None:
        best = self._top(heaps[_EMPTY], now)
        if empty or not heaps[_QUEUED]:
            return best
        other = self._top(heaps[_QUEUED], now)
        if best is None or other is None:
            return best or other
        # No two have the same order of joining.
        return min(best, other)

    def _top(self, heap: _Heap, now: float) -> _Entry | None:
        while heap:
            entry = heap[0]
            state = entry[3]
            if entry[2] == state.version:
                if self.is_open(state, now):
                    return entry
                # Its pace has fallen since it was inserted, and with it what it may be sent.
                state.version += 1
            heapq.heappop(heap)
        return None


def _where_warm(fitting: Sequence[ReplicaState], adapter: str) -> list[ReplicaState]:
    """Those that were sent the LoRA adapter lately, and are not clearly busier than others; else all.

    An engine lists more adapters than it has in its GPU's memory. One that it did not use lately is copied
    there first, and pushes another out. That costs less than to wait where many are waiting.
    """
    least = min((state.in_flight for state in fitting), default=0)
    warm = [
        state
        for state in fitting
        if adapter in state.recent_adapters and state.in_flight <= least + _MOST_AHEAD
    ]
    return warm or list(fitting)
