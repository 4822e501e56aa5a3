"""The ledger of replicas: what each holds, and which accept more.

- `ReplicaLedger`: the replicas, with the holds and reservations on each.
- `OpenReplicas`: the open replicas of each pool, ordered by their capacity; finds the best one for a request.
- `ContextLimits`: the smallest context limits of each pool's connected replicas.
- `ContextLearning`: applies `observed` to the replicas of a ledger, and reports changes.

`ReplicaLedger`. A running request *holds* tokens of its replica. A *reservation* sets tokens of a replica
aside for one queued request (`dispatch.dispatcher`). Rules:

- The selection of a replica is followed immediately by `hold`, so that the next decision sees the hold.
- `held_tokens == sum of the holds of its running requests`, exactly, at any time. This includes a lost
  replica: its requests are released one by one, as the gateways report how they ended.
- Free tokens count the *expected* needs of requests, so the ledger balances load by work, not by number of
  requests.

`OpenReplicas`. A replica is *open* if it may accept one more request. The best one for a request is found in
amortised constant time, unless the request excludes single replicas. Open replicas are in heaps, those with
the most free tokens first. A heap entry is valid only while its version is the replica's current one, and
every change of a replica's capacity creates a new version. The next search inserts the replicas that have
changed since the last one, in O(log replicas) each, so that several changes in between cost one insertion.

There is a heap for each pair of numbers of long and of longest prefills in flight, of which there are few.
A replica may be open to short requests and closed to longer ones, and short requests are served better
without a long prefill in flight. Each pair has two heaps: replicas with capacity for batch work, and the
others. If a request does not fit the first replica of a heap, it fits no other of that heap.
"""

import bisect
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from serve_app.core.commands import ContextLearned
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.observed import LearnedBatch, LearnedContext, LearnedLimit
from serve_app.core.routing.prefill_cost import DecayingRate, Speeds
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.routing.replica_state import KvUse, PrefillClass, ReplicaState, Running, Suspension
from serve_app.request import ANYWHERE, Destination, Usage


class ContextLimits:
    """The smallest context limits of each pool's connected replicas."""

    def __init__(self) -> None:
        # Pool, effective limit and reported limit of each counted replica.
        self._counted: dict[str, tuple[str, int, int]] = {}
        self._limits: dict[str, Counter[int]] = {}
        self._reported: dict[str, Counter[int]] = {}
        self._smallest: dict[str, tuple[int, int]] = {}
        self.changes = 0

    def of(self, pool: str) -> int | None:
        """Return the smallest limit of a pool in tokens, or None if it has no replica."""
        smallest = self._smallest.get(pool)
        return None if smallest is None else smallest[0]

    def reported(self, pool: str) -> int | None:
        """Return the smallest reported limit. Engines certainly reject longer requests."""
        smallest = self._smallest.get(pool)
        return None if smallest is None else smallest[1]

    def update(self, state: ReplicaState) -> None:
        """Update the limits after a replica has joined, left, or changed its limit."""
        replica_id, spec = state.spec.replica_id, state.spec
        after = (spec.pool, state.context_limit, spec.max_model_len) if state.joined else None
        before = self._counted.pop(replica_id, None)
        if after is not None:
            self._counted[replica_id] = after
        if after == before:
            return
        for entry, by in ((before, -1), (after, 1)):
            if entry is not None:
                pool, limit, reported = entry
                _count(self._limits.setdefault(pool, Counter()), limit, by)
                _count(self._reported.setdefault(pool, Counter()), reported, by)
        for pool in {entry[0] for entry in (before, after) if entry is not None}:
            self._update_smallest(pool)

    def _update_smallest(self, pool: str) -> None:
        limits, before = self._limits[pool], self._smallest.pop(pool, None)
        if limits:
            self._smallest[pool] = (min(limits), min(self._reported[pool]))
        else:
            del self._limits[pool], self._reported[pool]
        self.changes += before != self._smallest.get(pool)

    def __repr__(self) -> str:
        return f"<ContextLimits {self._smallest}>"


def _count(limits: Counter[int], limit: int, by: int) -> None:
    limits[limit] += by
    if not limits[limit]:
        del limits[limit]


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
        headroom: KV tokens that must remain free (`dispatch.backfill`), except on an idle replica.
        long_limits: only replicas with fewer long prefills in flight: (), (long), or (long, longest).
        is_backfill: only replicas with capacity that other requests leave (`dispatch.backfill`).
        avoided: excluded replicas, because the request has failed there.
        quarantined: only replicas without another request in quarantine.
        destination: which replicas of the pool can serve it.
        at_once: only replicas whose engine begins it immediately.
        may_wait: also replicas without free tokens, unless some are reserved; it waits in the engine.
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
    may_wait: bool = False

    @property
    def is_restricted(self) -> bool:
        """True if it excludes single replicas, so that the order of the heaps does not apply."""
        return self.destination is not ANYWHERE or self.quarantined or self.at_once or bool(self.avoided)

    def fits(self, free_tokens: int, state: ReplicaState) -> bool:
        """Return whether the request fits into the free tokens of a replica, or may wait for them there."""
        if self.may_wait and not state.reserved_tokens:
            return True
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


_STARTS_TIME_CONSTANT_S = 2.0
_REPORT_GAP_WEIGHT = 0.2
# Margin of the forecast KV cache, in standard deviations of the sum of all final sizes.
_SPREAD_MARGIN = 0.75
# Shares of the KV cache, by final sizes, above which its peak is forecast, and below which it no longer is.
_FORECAST_RATIO, _NO_FORECAST_RATIO = 0.6, 0.5
# Time per output token, for the forecast, of a replica whose pace is unknown.
_USUAL_TPOT_S = 0.03
# KV tokens of a cache of unknown size. Replicas are still ordered by their held tokens.
_NO_LIMIT = 1 << 40


class ReplicaLedger:
    """The replicas, with their holds and reservations.

    Args:
        report_limit_s: age in seconds at which a report becomes stale.

    Attributes:
        open: replicas that may accept one more request.
        speeds: whether replicas of a pool differ in speed.
        forecasts_peak: whether running requests count at the peak of their use together (`KvForecast`);
            otherwise each counts at its final size, for comparisons.
    """

    def __init__(self, *, backpressure: Backpressure, report_limit_s: float) -> None:
        self._backpressure = backpressure
        self._report_limit_s = report_limit_s
        self._replicas: dict[str, ReplicaState] = {}
        self.forecasts_peak = True
        self.speeds = Speeds()
        self.by_adapter = ReplicasByAdapter()
        self.open = OpenReplicas(backpressure, self._replicas, self.by_adapter)
        self.contexts = ContextLimits()
        self._by_pool: dict[str, dict[str, ReplicaState]] = {}
        # Replicas with a fresh report, the oldest report first; reports arrive in order of time.
        self._fresh: OrderedDict[str, float] = OrderedDict()
        # Caches of a live and a usable replica of each pool; checked before use.
        self._alive: dict[str, ReplicaState | None] = {}
        self._usable: dict[str, ReplicaState | None] = {}
        # Cache of `smallest_kv_budget`.
        self._smallest_budgets: dict[str, int] = {}
        self._next_order = 0

    # Replicas

    def join(self, spec: ReplicaSpec, now: float) -> None:
        """Add a replica, or one that rejoins with its running requests. It opens with its first report."""
        state = self._replicas.get(spec.replica_id)
        only_adapters_changed = (
            state is not None and state.joined and _differ_only_in_adapters(state.spec, spec)
        )
        if state is None:
            state = self._add(spec, now)
        self._move(state, spec)
        state.lost_at, state.report, reports = math.inf, None, state.reports
        reports.stale, reports.least_tpot_s = False, math.inf
        # It remains suspended until its first report.
        state.suspension = Suspension(active=state.suspension.active)
        state.hang_detector.join(spec.stall_timeout_s)
        if not only_adapters_changed:
            # It may be a server that was restarted with another limit.
            unknown = spec.max_num_seqs is None
            state.learned.batch = LearnedBatch() if unknown else None
            state.learned.context = None if spec.has_known_context else LearnedContext()
            state.learned.limit = LearnedLimit() if unknown else None
        self._set_kv_budget(state, _kv_budget(spec))
        self._fresh.pop(spec.replica_id, None)
        self.open.update(state)
        self.contexts.update(state)

    def report(self, replica_id: str, report: ReplicaReport, now: float) -> bool:
        """Record a report. Return whether the replica was stale. Reports of unknown replicas are ignored."""
        state = self._replicas.get(replica_id)
        if state is None or not state.joined:
            return False
        self._count_received(state, report)
        reports, learned, suspension = state.reports, state.learned, state.suspension
        if state.report is not None:
            reports.gap_s += _REPORT_GAP_WEIGHT * (now - reports.at - reports.gap_s)
        was_stale = reports.stale
        state.report, reports.at, reports.stale = report, now, False
        # Measured paces follow: they include what slow clients and providers take.
        state.gated = self._backpressure.gates(state)
        if report.tpot_s is not None:
            state.tpot_s, reports.least_tpot_s = report.tpot_s, min(reports.least_tpot_s, report.tpot_s)
        elif state.tpot_s is None and (measured_s := learned.pace.tpot_s(now)) is not None:
            state.report = replace(report, tpot_s=measured_s)
        suspension.active = suspension.active and now < suspension.until
        if learned.batch is not None:
            learned.batch.observe(report)
        if report.computes:
            state.hang_detector.on_progress(now)
        if report.kv_usage_ratio is not None and state.spec.kv_tokens is not None:
            state.kv.observe(int(report.kv_usage_ratio * state.spec.kv_tokens))
        self._forecast(state, now)
        self._fresh[replica_id] = now
        self._fresh.move_to_end(replica_id)
        self.open.update(state)
        return was_stale

    def lose(self, replica_id: str, now: float) -> None:
        """Close a lost replica. The holds of its requests remain until each is released."""
        state = self._replicas.get(replica_id)
        if state is None or not state.joined:
            return
        state.lost_at = now
        self._fresh.pop(replica_id, None)
        self.open.update(state)
        self._remove_if_done(state)
        self.contexts.update(state)

    def suspend(self, state: ReplicaState, until: float) -> None:
        """Send no requests to a replica until its first report at or after `until`."""
        state.suspension.active, state.suspension.until = True, until
        self.open.update(state)

    def expire_reports(self, now: float) -> list[tuple[str, float]]:
        """Close replicas whose report is stale. Return each with the age of its report in seconds."""
        next_at = self.next_report_expiry()
        if next_at is None or now < next_at:
            return []
        expired = []
        while self._fresh:
            replica_id, reported_at = next(iter(self._fresh.items()))
            if now < reported_at + self._report_limit_s:
                break
            del self._fresh[replica_id]
            state = self._replicas[replica_id]
            state.reports.stale = True
            self.open.update(state)
            expired.append((replica_id, now - reported_at))
        return expired

    def next_report_expiry(self) -> float | None:
        """Return the time at which the oldest report becomes stale, or None if there is none."""
        for reported_at in self._fresh.values():
            return reported_at + self._report_limit_s
        return None

    def observe_speed(
        self, state: ReplicaState, prefill_tokens: int, output_tokens: int, seconds: float, now: float
    ) -> None:
        """Learn the speed of a replica from a complete answer; see `speeds`.

        Args:
            prefill_tokens: prompt tokens that it had to compute.
            seconds: time since its dispatch.
        """
        work = self.speeds.work(prefill_tokens, output_tokens, state.in_flight)
        if work > 0 and seconds > 0:
            state.speed.record(seconds, work, now)
            self.speeds.compare(state.spec.pool, self.of_pool(state.spec.pool), now)

    # Requests

    def of(self, replica_id: str, now: float) -> ReplicaState:
        """Return a replica by its id, or a lost one if it is unknown: its gateway reconnected before it."""
        state = self._replicas.get(replica_id)
        if state is None:
            state = self._add(_unknown_spec(replica_id), now)
            state.lost_at = now
        return state

    def hold(self, running: Running, now: float, *, seen: bool = False) -> None:
        """Hold a part of a replica for one running request.

        Args:
            seen: whether the replica's reports already include the request (it ran before this scheduler
                started).
        """
        state = running.replica
        state.order, self._next_order = self._next_order, self._next_order + 1
        state.in_flight += 1
        state.dispatches += not seen
        state.held_tokens += running.tokens
        if running.use is not None:
            running.use.started = running.started
        self._forecast(state, now, added=running.use)
        state.prefills.count(running, 1)
        state.quarantined += running.quarantined
        state.unstarted += not running.started
        state.unseen += not seen
        self.open.update(state)

    def start(self, running: Running, now: float) -> None:
        """End the prefill and quarantine of a request whose answer has started."""
        state = running.replica
        running.started = True
        if running.use is not None:
            running.use.started = True
        state.unstarted -= 1
        state.quarantined -= running.quarantined
        running.quarantined = False
        _end_prefill(running)
        state.starts.add(1.0, now)
        self._clamp_unseen(state)
        self.open.update(state)

    def end_prefill(self, running: Running) -> None:
        """End the prefill of one request, observed or assumed."""
        _end_prefill(running)
        self.open.update(running.replica)

    def release(self, running: Running, now: float, *, ran: bool = True) -> None:
        """Release what one request holds.

        Args:
            ran: whether it left the engine's queue, so that it counts for the engine's pace.
        """
        state = running.replica
        state.in_flight -= 1
        if state.learned.limit is not None:
            state.learned.limit.on_departure(now)
        state.held_tokens -= running.tokens
        self._forecast(state, now, removed=running.use)
        state.quarantined -= running.quarantined
        state.prefills.count(running, -1)
        if not running.started:
            state.unstarted -= 1
            if ran:
                state.starts.add(1.0, now)
        self._clamp_unseen(state)
        if not state.in_flight:
            state.kv.shared_tokens = 0
        self.open.update(state)
        self._remove_if_done(state)

    def reserve(self, state: ReplicaState, tokens: int) -> None:
        """Reserve tokens of a replica for a queued request; 0 removes the reservation."""
        state.reserved_tokens = tokens
        self.open.update(state)

    def on_limits_changed(self) -> None:
        """Check all replicas again after a change of the backpressure limits."""
        for state in self._replicas.values():
            self.open.update(state)

    # Queries

    def context_limit(self, pool: str) -> int | None:
        """Return the smallest context limit of a pool's replicas in tokens, or None if it has none."""
        return self.contexts.of(pool)

    def has_alive(self, pool: str) -> bool:
        """Return whether a replica of the pool is connected, reports its load and does not drain."""
        return self._has(pool, self._alive, lambda state: state.is_alive)

    def has_usable(self, pool: str) -> bool:
        """Return whether a replica of the pool accepts requests, even if it has no capacity now."""
        return self._has(pool, self._usable, lambda state: state.is_usable)

    def _has(
        self,
        pool: str,
        cached: dict[str, ReplicaState | None],
        is_match: Callable[[ReplicaState], bool],
    ) -> bool:
        # Called for each report; the cached replica usually still qualifies.
        found = cached.get(pool)
        if found is None or not is_match(found) or found.spec.pool != pool:
            found = cached[pool] = next(filter(is_match, self.of_pool(pool)), None)
        return found is not None

    def of_pool(self, pool: str) -> Collection[ReplicaState]:
        """Return the replicas of one pool."""
        members = self._by_pool.get(pool)
        return () if members is None else members.values()

    def smallest_kv_budget(self, pool: str) -> int:
        """Return the smallest KV cache of a pool's replicas in tokens, or 0 if it has none."""
        known = self._smallest_budgets.get(pool)
        if known is None:
            known = min((state.kv_budget for state in self.of_pool(pool)), default=0)
            self._smallest_budgets[pool] = known
        return known

    @property
    def connected_count(self) -> int:
        """Number of connected replicas."""
        return sum(state.joined for state in self._replicas.values())

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self._replicas.values())

    def __getitem__(self, replica_id: str) -> ReplicaState:
        return self._replicas[replica_id]

    def get(self, replica_id: str) -> ReplicaState | None:
        """Return the replica with this id, or None if it is unknown."""
        return self._replicas.get(replica_id)

    def most_free(self, pool: str, destination: Destination = ANYWHERE) -> ReplicaState | None:
        """Return the usable replica of `pool` and `destination` with the most free tokens, or None."""
        usable = [
            each
            for each in self.of_pool(pool)
            if each.is_usable and destination.admits(each.spec.replica_id, each.spec.adapters)
        ]
        return min(usable, key=lambda state: (-state.free_tokens, state.order), default=None)

    def __repr__(self) -> str:
        return f"<ReplicaLedger connected={self.connected_count} {list(self._replicas.values())}>"

    # Internals

    def _add(self, spec: ReplicaSpec, now: float) -> ReplicaState:
        state = ReplicaState(
            spec,
            self._next_order,
            DecayingRate(_STARTS_TIME_CONSTANT_S, now),
            kv_budget=_kv_budget(spec),
        )
        self._next_order += 1
        self._replicas[spec.replica_id] = state
        self._by_pool.setdefault(spec.pool, {})[spec.replica_id] = state
        self._smallest_budgets.pop(spec.pool, None)
        self.by_adapter.add(state)
        return state

    def _move(self, state: ReplicaState, spec: ReplicaSpec) -> None:
        """Apply another spec of a replica, possibly with another pool."""
        if state.spec.pool != spec.pool:
            del self._by_pool[state.spec.pool][spec.replica_id]
            self._by_pool.setdefault(spec.pool, {})[spec.replica_id] = state
            self._smallest_budgets.clear()
        self.by_adapter.remove(state)
        state.spec = spec
        self.by_adapter.add(state)

    def _set_kv_budget(self, state: ReplicaState, tokens: int) -> None:
        if state.kv_budget != tokens:
            state.kv_budget = tokens
            self._smallest_budgets.pop(state.spec.pool, None)

    def _forecast(
        self, state: ReplicaState, now: float, *, added: KvUse | None = None, removed: KvUse | None = None
    ) -> None:
        """Update the peak of a replica's KV cache, after a request was added or removed."""
        kv, tpot_s = state.kv, state.tpot_s or (state.report.tpot_s if state.report else None)
        kv.advance(now, tpot_s or _USUAL_TPOT_S)
        if added is not None:
            kv.add(added)
        if removed is not None:
            kv.remove(removed)
        if state.held_tokens > _FORECAST_RATIO * state.kv_budget and self.forecasts_peak:
            kv.activate()
        elif state.held_tokens < _NO_FORECAST_RATIO * state.kv_budget:
            kv.deactivate()
        state.peak_tokens = state.held_tokens
        if kv.active:
            state.peak_tokens = kv.peak() + int(_SPREAD_MARGIN * kv.spread)
        state.peak_tokens = max(0, state.peak_tokens - kv.shared_tokens)

    def _count_received(self, state: ReplicaState, report: ReplicaReport) -> None:
        reports = state.reports
        if report.received is None:
            # The report was read after the previous report arrived, so it includes everything sent before
            # that.
            state.unseen = min(state.unseen, state.dispatches - reports.dispatches)
            reports.dispatches = state.dispatches
            return
        # The first report sets the baseline, because a new scheduler does not know the earlier requests. A
        # count that decreases means that the replica was restarted under the same name.
        if reports.received is not None and report.received >= reports.received:
            state.unseen = max(0, state.unseen - (report.received - reports.received))
        reports.received = report.received

    def _clamp_unseen(self, state: ReplicaState) -> None:
        # A started request has been seen, whatever the counts. This also corrects counts after a request that
        # was lost in transit.
        state.unseen = min(state.unseen, state.unstarted)

    def _remove_if_done(self, state: ReplicaState) -> None:
        if not state.joined and state.in_flight == 0:
            del self._replicas[state.spec.replica_id]
            del self._by_pool[state.spec.pool][state.spec.replica_id]
            self._smallest_budgets.pop(state.spec.pool, None)
            self.by_adapter.remove(state)


def _unknown_spec(replica_id: str) -> ReplicaSpec:
    return ReplicaSpec(replica_id=replica_id, pool="", max_model_len=1, kv_tokens=1, max_num_seqs=1)


def _kv_budget(spec: ReplicaSpec) -> int:
    # vLLM does not start unless one request of full length fits, so one may always be sent.
    if spec.kv_tokens is None:
        return _NO_LIMIT
    return max(spec.kv_tokens, spec.max_model_len) if spec.has_known_context else spec.kv_tokens


def _differ_only_in_adapters(before: ReplicaSpec, after: ReplicaSpec) -> bool:
    """Return whether two specs differ only in their adapters, which an engine can load and unload."""
    return before.adapters != after.adapters and replace(before, adapters=after.adapters) == after


def _end_prefill(running: Running) -> None:
    running.replica.prefills.count(running, -1)
    running.prefill_class, running.prefill_tokens = PrefillClass.SHORT, 0


class ContextLearning:
    """Updates the learned context limits of a ledger, and reports changes."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger

    def on_rejection(self, scheduled: ScheduledRequest, stated_tokens: int | None) -> list[ContextLearned]:
        """Learn from a rejection as too long by the replica of a request."""
        assert scheduled.running is not None
        replica = scheduled.running.replica
        if (context := replica.learned.context) is None:
            return []
        before = context.limit_tokens
        estimated = scheduled.estimate.prompt_tokens + _requested_output(scheduled)
        context.on_rejection(estimated, stated_tokens)
        rejected_by = (*scheduled.attempts.too_long_for, replica.spec.replica_id)
        scheduled.attempts = replace(scheduled.attempts, too_long_for=rejected_by)
        return self._changed(replica, before)

    def on_completion(self, scheduled: ScheduledRequest, usage: Usage) -> list[ContextLearned]:
        """Learn from a completed request and its engine's token counts."""
        # Engines count only the sum of several prompts or choices.
        if scheduled.request.shape.prompts != 1 or scheduled.request.spec.choices != 1:
            return []
        changed: list[ContextLearned] = []
        # The answer counts as one token: an engine that shifts its context may generate without limit.
        served = usage.prompt_tokens + min(1, usage.output_tokens)
        requested = usage.prompt_tokens + _requested_output(scheduled)
        running = scheduled.running
        if running is not None and (context := running.replica.learned.context) is not None:
            before = context.limit_tokens
            context.on_served(served)
            changed += self._changed(running.replica, before)
        for replica_id in scheduled.attempts.too_long_for:
            state = self._ledger.get(replica_id)
            if state is not None and (context := state.learned.context) is not None:
                before = context.limit_tokens
                context.on_counted(requested)
                changed += self._changed(state, before)
        return changed

    def _changed(self, state: ReplicaState, before: int | None) -> list[ContextLearned]:
        context = state.learned.context
        after = None if context is None else context.limit_tokens
        if after == before:
            return []
        self._ledger.contexts.update(state)
        return [ContextLearned(replica_id=state.spec.replica_id, context_tokens=after)]


def _requested_output(scheduled: ScheduledRequest) -> int:
    """Return the output tokens that an engine must have capacity for: the client's limit, if any."""
    return scheduled.request.spec.max_output_tokens or 0
