"""The ledger: the reservations on each replica, and the open replicas of each pool by load.

Rules:

- A choice of a replica is followed at once by `hold`, so that the next decision sees the reservation.
- `held_tokens == sum of the holds of its running requests`, exactly, at any time. That includes a lost
  replica: its requests return one by one, from the gateways that know how they ended.
- Free tokens count what requests are *expected* to need. So the ledger balances load by work, not by number
  of requests.

`open_replicas` finds the best replica that may take one more request.
"""

import bisect
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from serve_app.core.routing.observed import ConcurrencyLimit, LearnedBatch, LearnedContext
from serve_app.core.routing.rate import DecayingRate
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.routing.replica_state import Hold, PrefillClass, ReplicaState
from serve_app.request import ANYWHERE, Destination


class AdapterHolders:
    """The replicas of a ledger by the adapters that they list, those that are lost but not done with them."""

    def __init__(self) -> None:
        self._by_adapter: dict[str, dict[str, ReplicaState]] = {}

    def add(self, state: ReplicaState) -> None:
        """Note what a replica lists."""
        for adapter in state.spec.adapters:
            self._by_adapter.setdefault(adapter, {})[state.spec.replica_id] = state

    def remove(self, state: ReplicaState) -> None:
        """Forget it, before it lists others or is gone."""
        for adapter in state.spec.adapters:
            holders = self._by_adapter[adapter]
            del holders[state.spec.replica_id]
            if not holders:
                del self._by_adapter[adapter]

    def of(self, adapter: str) -> Collection[ReplicaState]:
        """The replicas that list an adapter."""
        holders = self._by_adapter.get(adapter)
        return () if holders is None else holders.values()

    def __repr__(self) -> str:
        return f"<AdapterHolders { ({name: len(holders) for name, holders in self._by_adapter.items()}) }>"


# The open replicas of each pool, ordered so that the best one for a request is found in O(1).
#
# A replica is *open* when it may take one more request. Open replicas are in heaps, those with the most free
# tokens first. A heap entry is valid only while its version is the replica's, and every change of a replica's
# capacity gives it a new version. An update costs O(log replicas).
#
# There is a heap for each pair of numbers of long and of longest prefills in flight, of which there are few.
# A replica may be open to short requests and closed to longer ones, and short requests do better where no
# long prefill is under way. Each pair has two heaps: replicas whose engine queue is empty, and the others,
# since some requests need an empty one. No replica of a heap fits a request that the heap's first does not
# fit.


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


# The smallest context limit of each pool's connected replicas, kept while replicas come, go and learn.


class ContextLimits:
    """Counts the limits of each pool, of which there are few different ones.

    Attributes:
        changes: how often the smallest limit of some pool has changed.
    """

    def __init__(self) -> None:
        # Pool, limit and stated limit of each replica that is counted.
        self._counted: dict[str, tuple[str, int, int]] = {}
        self._limits: dict[str, Counter[int]] = {}
        self._told: dict[str, Counter[int]] = {}
        self._smallest: dict[str, tuple[int, int]] = {}
        self.changes = 0

    def of(self, pool: str) -> int | None:
        """The smallest limit of a pool, in tokens; None while it has no replica."""
        smallest = self._smallest.get(pool)
        return None if smallest is None else smallest[0]

    def told(self, pool: str) -> int | None:
        """The same without what was only learned: a longer request is refused for certain."""
        smallest = self._smallest.get(pool)
        return None if smallest is None else smallest[1]

    def update(self, state: ReplicaState) -> None:
        """A replica has joined or is gone, or its limit is another one."""
        name, spec = state.spec.replica_id, state.spec
        now = (spec.pool, state.context_limit, spec.max_model_len) if state.joined else None
        before = self._counted.pop(name, None)
        if now is not None:
            self._counted[name] = now
        if now == before:
            return
        for entry, by in ((before, -1), (now, 1)):
            if entry is not None:
                pool, limit, told = entry
                _count(self._limits.setdefault(pool, Counter()), limit, by)
                _count(self._told.setdefault(pool, Counter()), told, by)
        for pool in {entry[0] for entry in (before, now) if entry is not None}:
            self._measure(pool)

    def _measure(self, pool: str) -> None:
        limits, before = self._limits[pool], self._smallest.pop(pool, None)
        if limits:
            self._smallest[pool] = (min(limits), min(self._told[pool]))
        else:
            del self._limits[pool], self._told[pool]
        self.changes += before != self._smallest.get(pool)

    def __repr__(self) -> str:
        return f"<ContextLimits {self._smallest}>"


def _count(limits: Counter[int], limit: int, by: int) -> None:
    limits[limit] += by
    if not limits[limit]:
        del limits[limit]


_STARTS_TIME_CONSTANT_S = 2.0
_REPORT_GAP_WEIGHT = 0.2
# Tokens of a KV cache whose size is unknown. Replicas are still ordered by what is reserved of them.
_NO_LIMIT = 1 << 40


class ReplicaLedger:
    """The replicas and their holds.

    Args:
        backpressure: decides when a replica may be sent more.
        report_limit_s: age at which a report no longer counts.
        kv_fill_ratio: share of the KV cache that may be reserved.

    Attributes:
        open: the replicas that may take one more request.
        contexts: the context limits of the pools.
        holders: which replicas list which LoRA adapters.
    """

    def __init__(self, *, backpressure: Backpressure, report_limit_s: float, kv_fill_ratio: float) -> None:
        self._backpressure = backpressure
        self._report_limit_s = report_limit_s
        self._kv_fill_ratio = kv_fill_ratio
        self._replicas: dict[str, ReplicaState] = {}
        self.holders = AdapterHolders()
        self.open = OpenReplicas(backpressure, self._replicas, self.holders)
        self.contexts = ContextLimits()
        self._by_pool: dict[str, dict[str, ReplicaState]] = {}
        # Replicas with a fresh report, the oldest report first; reports arrive in the order of time.
        self._fresh: OrderedDict[str, float] = OrderedDict()
        # A live and a usable replica of each pool, as found last; they may not be any more.
        self._alive: dict[str, ReplicaState | None] = {}
        self._usable: dict[str, ReplicaState | None] = {}
        self._next_order = 0

    # Replicas

    def join(self, spec: ReplicaSpec, now: float) -> None:
        """Add a replica, or one that returns with what it still runs. It opens with its first report."""
        state = self._replicas.get(spec.replica_id)
        is_same = state is not None and state.joined and _differ_by_adapters(state.spec, spec)
        if state is None:
            state = self._add(spec, now)
        self._move(state, spec)
        state.joined, state.report, state.stale = True, None, False
        state.suspended_until, state.suspensions, state.faults = 0.0, 0, 0
        state.answers.join(spec.stall_timeout_s)
        if not is_same:
            # It may be a server that was restarted with another limit.
            unknown = spec.max_num_seqs is None
            state.batch = LearnedBatch() if unknown else None
            state.context = None if spec.tells_context else LearnedContext()
            state.concurrency = ConcurrencyLimit() if unknown else None
        state.kv_budget = self._kv_budget(spec)
        self._fresh.pop(spec.replica_id, None)
        self.open.update(state, now)
        self.contexts.update(state)

    def report(self, replica_id: str, report: ReplicaReport, now: float) -> bool:
        """Record a report; True when the replica was stale until now. Unknown replicas are ignored."""
        state = self._replicas.get(replica_id)
        if state is None or not state.joined:
            return False
        self._count_received(state, report)
        if state.report is not None:
            gap_s = now - state.reported_at
            state.report_gap_s += _REPORT_GAP_WEIGHT * (gap_s - state.report_gap_s)
        was_stale = state.stale
        state.tpot_s = state.tpot_s if report.tpot_s is None else report.tpot_s
        if state.tpot_s is None and (measured_s := state.pace.tpot_s(now)) is not None:
            report = replace(report, tpot_s=measured_s)
        state.report, state.reported_at, state.stale = report, now, False
        state.suspended = state.suspended and now < state.suspended_until
        if state.batch is not None:
            state.batch.observe(report)
        if report.computes:
            state.answers.on_sign(now)
        state.gated = self._backpressure.gates(state)
        self._fresh[replica_id] = now
        self._fresh.move_to_end(replica_id)
        self.open.update(state, now)
        return was_stale

    def lose(self, replica_id: str, now: float) -> None:
        """Close a replica that is gone; the holds of its requests stay until each is released."""
        state = self._replicas.get(replica_id)
        if state is None or not state.joined:
            return
        state.joined = False
        self._fresh.pop(replica_id, None)
        self.open.update(state, now)
        self._forget_if_done(state)
        self.contexts.update(state)

    def suspend(self, state: ReplicaState, until: float, now: float) -> None:
        """Send nothing more to a replica until it reports at or after a time."""
        state.suspended, state.suspended_until = True, until
        self.open.update(state, now)

    def expire_reports(self, now: float) -> list[tuple[str, float]]:
        """Close replicas whose report is too old; returns each with the age of its report in seconds."""
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
            state.stale = True
            self.open.update(state, now)
            expired.append((replica_id, now - reported_at))
        return expired

    def next_report_expiry(self) -> float | None:
        """When the oldest report becomes too old; None when there is none."""
        for reported_at in self._fresh.values():
            return reported_at + self._report_limit_s
        return None

    def observe_latency(
        self, replica_id: str, tokens: int, seconds: float, now: float, *, streamed: bool
    ) -> None:
        """An answer has begun so many seconds after it was sent; see `observed.ConcurrencyLimit`."""
        state = self._replicas[replica_id]
        if state.in_flight_limit is not None and state.concurrency is not None:
            state.concurrency.observe(tokens, seconds, now, in_flight=state.in_flight, streamed=streamed)
            self.open.update(state, now)

    # Requests

    def hold(
        self, replica_id: str, hold: Hold, now: float, *, seen: bool = False, started: bool = False
    ) -> None:
        """Reserve a part of a replica for one request.

        Args:
            seen: the replica has counted the request already (it ran before this scheduler started).
            started: its answer has begun.
        """
        state = self._replicas.get(replica_id)
        if state is None:
            # A gateway returned before the replica: record the hold, open nothing.
            state = self._add(_unknown_spec(replica_id), now)
            state.joined = False
        state.in_flight += 1
        state.dispatches += not seen
        state.held_tokens += hold.tokens
        _count_prefill(state, hold, 1)
        state.quarantined += hold.quarantined
        state.unstarted += not started
        state.unseen += not seen
        self.open.update(state, now)

    def start(self, replica_id: str, hold: Hold, now: float) -> Hold:
        """The answer of one request has begun, which ends prefill and quarantine; return what is held on."""
        state = self._replicas[replica_id]
        state.unstarted -= 1
        state.quarantined -= hold.quarantined
        _count_prefill(state, hold, -1)
        state.starts.add(1.0, now)
        self._settle(state)
        self.open.update(state, now)
        return Hold(hold.tokens)

    def end_prefill(self, replica_id: str, hold: Hold, now: float) -> None:
        """The prefill of one hold on this replica has ended, or is taken to have ended."""
        state = self._replicas[replica_id]
        _count_prefill(state, hold, -1)
        self.open.update(state, now)

    def release(self, replica_id: str, hold: Hold, now: float, *, started: bool, ran: bool = True) -> None:
        """Remove the hold of one request.

        Args:
            started: `start` was called for it.
            ran: it left the engine's queue at some time, so it counts for the engine's pace.
        """
        state = self._replicas[replica_id]
        state.in_flight -= 1
        state.held_tokens -= hold.tokens
        state.quarantined -= hold.quarantined
        _count_prefill(state, hold, -1)
        if not started:
            state.unstarted -= 1
            if ran:
                state.starts.add(1.0, now)
        self._settle(state)
        self.open.update(state, now)
        self._forget_if_done(state)

    def reserve(self, state: ReplicaState, tokens: int, now: float) -> None:
        """Keep so many tokens of a replica free for a waiting request; 0 returns them."""
        state.reserved_tokens = tokens
        self.open.update(state, now)

    def on_limits_changed(self, now: float) -> None:
        """The limits of backpressure have changed."""
        for state in self._replicas.values():
            self.open.update(state, now)

    # Queries

    def context_limit(self, pool: str) -> int | None:
        """Smallest context limit among the replicas of a pool, in tokens; None while it has none."""
        return self.contexts.of(pool)

    def has_alive(self, pool: str) -> bool:
        """Whether a replica of a pool is connected, reports and does not drain."""
        return self._has(pool, self._alive, lambda state: state.is_alive)

    def has_usable(self, pool: str) -> bool:
        """Whether a replica of a pool will take requests again, even if it has no capacity now."""
        return self._has(pool, self._usable, lambda state: state.is_usable)

    def _has(
        self,
        pool: str,
        found_before: dict[str, ReplicaState | None],
        is_wanted: Callable[[ReplicaState], bool],
    ) -> bool:
        # It is asked at each report, and the replica that was found before mostly still is.
        found = found_before.get(pool)
        if found is None or not is_wanted(found) or found.spec.pool != pool:
            found = found_before[pool] = next(filter(is_wanted, self.of_pool(pool)), None)
        return found is not None

    def of_pool(self, pool: str) -> Iterable[ReplicaState]:
        """The replicas of one pool."""
        members = self._by_pool.get(pool)
        return () if members is None else members.values()

    @property
    def joined(self) -> int:
        """Number of connected replicas."""
        return sum(state.joined for state in self._replicas.values())

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self._replicas.values())

    def __getitem__(self, replica_id: str) -> ReplicaState:
        return self._replicas[replica_id]

    def get(self, replica_id: str) -> ReplicaState | None:
        """The replica of this id; None when it is unknown."""
        return self._replicas.get(replica_id)

    def most_free(self, pool: str, destination: Destination = ANYWHERE) -> ReplicaState | None:
        """The usable replica of `pool` that will do, with the most free tokens; None when there is none."""
        usable = [
            each
            for each in self.of_pool(pool)
            if each.is_usable and destination.admits(each.spec.replica_id, each.spec.adapters)
        ]
        return min(usable, key=lambda state: (-state.free_tokens, state.order), default=None)

    def __repr__(self) -> str:
        return f"<ReplicaLedger joined={self.joined} {list(self._replicas.values())}>"

    # Internals

    def _add(self, spec: ReplicaSpec, now: float) -> ReplicaState:
        state = ReplicaState(
            spec,
            self._next_order,
            DecayingRate(_STARTS_TIME_CONSTANT_S, now),
            kv_budget=self._kv_budget(spec),
        )
        self._next_order += 1
        self._replicas[spec.replica_id] = state
        self._by_pool.setdefault(spec.pool, {})[spec.replica_id] = state
        self.holders.add(state)
        return state

    def _move(self, state: ReplicaState, spec: ReplicaSpec) -> None:
        """A replica has other limits, or another pool."""
        if state.spec.pool != spec.pool:
            del self._by_pool[state.spec.pool][spec.replica_id]
            self._by_pool.setdefault(spec.pool, {})[spec.replica_id] = state
        self.holders.remove(state)
        state.spec = spec
        self.holders.add(state)

    def _kv_budget(self, spec: ReplicaSpec) -> int:
        # vLLM itself refuses to start unless one request of full length fits, so one always may be sent.
        if spec.kv_tokens is None:
            return _NO_LIMIT
        fill = int(spec.kv_tokens * self._kv_fill_ratio)
        return max(fill, spec.max_model_len) if spec.tells_context else fill

    def _count_received(self, state: ReplicaState, report: ReplicaReport) -> None:
        if report.received is None:
            # What it shows was read after the report before it came, and so was everything sent until then.
            state.unseen = min(state.unseen, state.dispatches - state.dispatches_reported)
            state.dispatches_reported = state.dispatches
            return
        # The first report sets the mark: a new scheduler does not know what came before it. A count that
        # falls is a replica that was restarted under its old name.
        if state.received is not None and report.received >= state.received:
            state.unseen = max(0, state.unseen - (report.received - state.received))
        state.received = report.received

    def _settle(self, state: ReplicaState) -> None:
        # What has started has been seen, whatever the counts say. This also corrects counts that are off
        # because a request was lost on its way.
        state.unseen = min(state.unseen, state.unstarted)

    def _forget_if_done(self, state: ReplicaState) -> None:
        if not state.joined and state.in_flight == 0:
            del self._replicas[state.spec.replica_id]
            del self._by_pool[state.spec.pool][state.spec.replica_id]
            self.holders.remove(state)


def _unknown_spec(replica_id: str) -> ReplicaSpec:
    return ReplicaSpec(replica_id=replica_id, pool="", max_model_len=1, kv_tokens=1, max_num_seqs=1)


def _differ_by_adapters(before: ReplicaSpec, after: ReplicaSpec) -> bool:
    """Whether an engine has loaded or unloaded adapters, and goes on otherwise as it was."""
    return before.adapters != after.adapters and replace(before, adapters=after.adapters) == after


def _count_prefill(state: ReplicaState, hold: Hold, by: int) -> None:
    """Count the begin (1) or the end (-1) of a prefill."""
    long, longest = state.long_prefills
    is_long, is_longest = hold.prefill_class >= PrefillClass.LONG, hold.prefill_class is PrefillClass.LONGEST
    state.long_prefills = (long + by * is_long, longest + by * is_longest)
    state.pending_prefill_tokens += by * hold.prefill_tokens
