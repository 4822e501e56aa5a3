"""What each replica has been promised: the one record of who has room.

Rules of the ledger:

- The call that chooses a replica is followed, in the same breath, by `hold`; whoever looks next sees the
  promise.
- `held_tokens == sum of the holds of its running requests`, exactly, at any time, also for a replica that is
  lost: its requests come back one by one, from the gateways that know how they ended.
- A replica is *open* when it may take one more request. Open replicas stand in a heap, those with
  the most free tokens first, so the best is found in O(1) and kept in O(log replicas). A heap entry is valid
  only while its version is the replica's; everything that changes a replica's room gives it a new version.
- There is such a heap for each pair of numbers of long and of longest prefills in flight (at most a handful),
  because a replica may be open to short requests and closed to longer ones, and because short ones do better
  where no long prefill is under way. Each pair has two heaps, of replicas whose engine's queue is empty and
  of the others, since some classes may go to the former only.
- As the first of a heap has the most free tokens, no other replica fits a request that the first does not.

"Free" counts the tokens that requests are *expected* to need, so the ledger balances load by work, not by
count.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from serve_app.routing.rate import DecayingRate
from serve_app.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.routing.replica_state import Hold, PrefillClass, ReplicaState

_STARTS_TIME_CONSTANT_S = 2.0
_REPORT_GAP_WEIGHT = 0.2


_Heap = list[tuple[int, int, int, ReplicaState]]
_QUEUED, _EMPTY = 0, 1


class Backpressure(Protocol):
    """When a replica may be sent more."""

    def admits(self, replica: ReplicaState, now: float) -> bool:
        """Whether one more request may be sent, as far as the engine's queue and batch go."""

    def has_empty_queue(self, replica: ReplicaState) -> bool:
        """Whether hardly anything can be waiting in the engine's own queue."""

    def gates(self, replica: ReplicaState) -> bool:
        """Whether the replica's last report, and whether it was gated before, say that it is too busy."""


class ReplicaLedger:
    """Replicas by pool, their holds, and the best open one of each pool.

    Args:
        backpressure: when a replica may be sent more.
        report_limit_s: age at which a report no longer counts.
        kv_fill_ratio: share of the KV cache that may be promised.
    """

    def __init__(self, *, backpressure: Backpressure, report_limit_s: float, kv_fill_ratio: float) -> None:
        self._backpressure = backpressure
        self._report_limit_s = report_limit_s
        self._kv_fill_ratio = kv_fill_ratio
        self._replicas: dict[str, ReplicaState] = {}
        self._open: dict[str, dict[tuple[int, int], tuple[_Heap, _Heap]]] = {}
        self._context_limits: dict[str, int] = {}
        # Replicas with a fresh report, the oldest report first; reports come in the order of time.
        self._fresh: OrderedDict[str, float] = OrderedDict()
        self._joined = 0
        self._next_order = 0

    # Replicas

    def join(self, spec: ReplicaSpec, now: float) -> None:
        """Add a replica, or take it back with whatever it still runs. It opens with its first report."""
        state = self._replicas.get(spec.replica_id)
        if state is None:
            state = self._add(spec, now)
        elif not state.joined:
            self._joined += 1
        state.spec, state.joined, state.report, state.stale = spec, True, None, False
        state.kv_budget = self._kv_budget(spec)
        self._fresh.pop(spec.replica_id, None)
        self._refresh(state, now)
        self._measure_context_limits()

    def report(self, replica_id: str, report: ReplicaReport, now: float) -> bool:
        """Take a report in; True when the replica was stale until now. Unknown replicas are ignored."""
        state = self._replicas.get(replica_id)
        if state is None or not state.joined:
            return False
        self._count_received(state, report)
        if state.report is not None:
            gap_s = now - state.reported_at
            state.report_gap_s += _REPORT_GAP_WEIGHT * (gap_s - state.report_gap_s)
        was_stale = state.stale
        state.report, state.reported_at, state.stale, state.suspended = report, now, False, False
        state.gated = self._backpressure.gates(state)
        self._fresh[replica_id] = now
        self._fresh.move_to_end(replica_id)
        self._refresh(state, now)
        return was_stale

    def lose(self, replica_id: str, now: float) -> None:
        """Close a replica that is gone; its requests stay on the books until each is released."""
        state = self._replicas.get(replica_id)
        if state is None or not state.joined:
            return
        state.joined = False
        self._joined -= 1
        self._fresh.pop(replica_id, None)
        self._refresh(state, now)
        self._forget_if_done(state)
        self._measure_context_limits()

    def suspend(self, replica_id: str, now: float) -> None:
        """Send nothing more to a replica until it reports again."""
        state = self._replicas.get(replica_id)
        if state is not None:
            state.suspended = True
            self._refresh(state, now)

    def expire_reports(self, now: float) -> list[tuple[str, float]]:
        """Close replicas whose report is too old; (replica, age of the report in seconds) for each."""
        expired = []
        while self._fresh:
            replica_id, reported_at = next(iter(self._fresh.items()))
            if now < reported_at + self._report_limit_s:
                break
            del self._fresh[replica_id]
            state = self._replicas[replica_id]
            state.stale = True
            self._refresh(state, now)
            expired.append((replica_id, now - reported_at))
        return expired

    def next_report_expiry(self) -> float | None:
        """When the oldest report becomes too old; None when there is none."""
        for reported_at in self._fresh.values():
            return reported_at + self._report_limit_s
        return None

    # Requests

    def best(
        self,
        pool: str,
        tokens: int,
        now: float,
        *,
        long_limits: tuple[int, ...] = (),
        needs_empty_engine_queue: bool = False,
    ) -> ReplicaState | None:
        """The open replica of `pool` that suits best, few long prefills first, if `tokens` fit into any.

        Args:
            tokens: what the request will need; at most `context_limit(pool)`, so that an idle replica always
                fits.
            long_limits: only replicas with fewer prefills in flight than these: (long), or (long, longest).
            needs_empty_engine_queue: only replicas whose engine's queue is empty.
        """
        for long_prefills in sorted(self._open.get(pool, ())):
            if any(count >= limit for count, limit in zip(long_prefills, long_limits, strict=False)):
                continue
            state = self._freest(pool, long_prefills, now, needs_empty_engine_queue=needs_empty_engine_queue)
            if state is not None and tokens <= state.free_tokens:
                return state
        return None

    def open_replica(
        self,
        replica_id: str,
        tokens: int,
        now: float,
        *,
        long_limits: tuple[int, ...] = (),
        needs_empty_engine_queue: bool = False,
    ) -> ReplicaState | None:
        """The named replica if it is open and fits a request, as `best` has it; None otherwise."""
        state = self._replicas.get(replica_id)
        if state is None or tokens > state.free_tokens or not self._is_open(state, now):
            return None
        if any(count >= limit for count, limit in zip(state.long_prefills, long_limits, strict=False)):
            return None
        return state if not needs_empty_engine_queue or self._backpressure.has_empty_queue(state) else None

    def has_open(self, pool: str, now: float) -> bool:
        """Whether any replica of `pool` may take one more request, however small."""
        heaps = self._open.get(pool, ())
        return any(self._freest(pool, long_prefills, now) is not None for long_prefills in heaps)

    def hold(
        self, replica_id: str, hold: Hold, now: float, *, seen: bool = False, started: bool = False
    ) -> None:
        """Promise a part of a replica to one request.

        Args:
            seen: the replica has counted the request already (it ran before this scheduler came).
            started: its answer has begun.
        """
        state = self._replicas.get(replica_id)
        if state is None:
            # A gateway came back before the replica did: keep the books, open nothing.
            state = self._add(_unknown_spec(replica_id), now)
            state.joined = False
            self._joined -= 1
        state.in_flight += 1
        state.dispatches += not seen
        state.held_tokens += hold.tokens
        state.long_prefills = _moved(state.long_prefills, hold.prefill_class, 1)
        state.pending_prefill_tokens += hold.prefill_tokens
        state.unstarted += not started
        state.unseen += not seen
        self._refresh(state, now)

    def start(self, replica_id: str, now: float) -> None:
        """The answer of one request of this replica has begun; its prefill is ended on its own."""
        state = self._replicas[replica_id]
        state.unstarted -= 1
        state.starts.add(1.0, now)
        self._settle(state)
        self._refresh(state, now)

    def end_prefill(self, replica_id: str, hold: Hold, now: float) -> None:
        """The prefill of one hold on this replica is over, as far as anybody knows."""
        state = self._replicas[replica_id]
        state.long_prefills = _moved(state.long_prefills, hold.prefill_class, -1)
        state.pending_prefill_tokens -= hold.prefill_tokens
        self._refresh(state, now)

    def release(self, replica_id: str, hold: Hold, now: float, *, started: bool, ran: bool = True) -> None:
        """Take one request off a replica's books.

        Args:
            started: `start` was called for it.
            ran: it left the engine's queue at some time, so it counts towards the engine's pace.
        """
        state = self._replicas[replica_id]
        state.in_flight -= 1
        state.held_tokens -= hold.tokens
        state.long_prefills = _moved(state.long_prefills, hold.prefill_class, -1)
        state.pending_prefill_tokens -= hold.prefill_tokens
        if not started:
            state.unstarted -= 1
            if ran:
                state.starts.add(1.0, now)
        self._settle(state)
        self._refresh(state, now)
        self._forget_if_done(state)

    def reserve(self, state: ReplicaState, tokens: int, now: float) -> None:
        """Keep so many tokens of a replica for a request that waits; 0 gives them back."""
        state.reserved_tokens = tokens
        self._refresh(state, now)

    def on_limits_changed(self, now: float) -> None:
        """The rules of backpressure are others now."""
        for state in self._replicas.values():
            self._refresh(state, now)

    # Sight

    def context_limit(self, pool: str) -> int | None:
        """Smallest context limit among the replicas of a pool, in tokens; None while it has none."""
        return self._context_limits.get(pool)

    @property
    def joined(self) -> int:
        """Number of connected replicas."""
        return self._joined

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self._replicas.values())

    def __getitem__(self, replica_id: str) -> ReplicaState:
        return self._replicas[replica_id]

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    def is_open(self, replica_id: str, now: float) -> bool:
        """Whether the replica may take one more request, its free tokens apart."""
        return self._is_open(self._replicas[replica_id], now)

    def is_usable(self, state: ReplicaState) -> bool:
        """Whether the replica will take requests again, even if it has no room for any now."""
        report = state.report
        return state.joined and report is not None and not (report.draining or state.stale or state.suspended)

    def most_free(self, pool: str) -> ReplicaState | None:
        """The usable replica of `pool` with the most free tokens; None when none is usable."""
        usable = [each for each in self if each.spec.pool == pool and self.is_usable(each)]
        return min(usable, key=lambda state: (-state.free_tokens, state.order), default=None)

    def __repr__(self) -> str:
        return f"<ReplicaLedger joined={self._joined} {list(self._replicas.values())}>"

    # Inside

    def _add(self, spec: ReplicaSpec, now: float) -> ReplicaState:
        state = ReplicaState(
            spec,
            self._next_order,
            DecayingRate(_STARTS_TIME_CONSTANT_S, now),
            kv_budget=self._kv_budget(spec),
        )
        self._next_order += 1
        self._joined += 1
        self._replicas[spec.replica_id] = state
        return state

    def _kv_budget(self, spec: ReplicaSpec) -> int:
        # vLLM itself refuses to start unless one request of full length fits, so one always may be sent.
        return max(int(spec.kv_tokens * self._kv_fill_ratio), spec.max_model_len)

    def _freest(
        self, pool: str, long_prefills: tuple[int, int], now: float, *, needs_empty_engine_queue: bool = False
    ) -> ReplicaState | None:
        heaps = self._open[pool][long_prefills]
        best = self._top(heaps[_EMPTY], now)
        if needs_empty_engine_queue:
            return best
        other = self._top(heaps[_QUEUED], now)
        if best is None or other is None:
            return best or other
        return min(best, other, key=lambda state: (-state.free_tokens, state.order))

    def _top(self, heap: _Heap, now: float) -> ReplicaState | None:
        while heap:
            _, _, version, state = heap[0]
            if version == state.version:
                if self._is_open(state, now):
                    return state
                # Its pace has fallen since it was filed, and what it may be sent with it.
                state.version += 1
            heapq.heappop(heap)
        return None

    def _is_open(self, state: ReplicaState, now: float) -> bool:
        return self.is_usable(state) and not state.gated and self._backpressure.admits(state, now)

    def _refresh(self, state: ReplicaState, now: float) -> None:
        """File the replica anew after its room has changed."""
        state.version += 1
        if not self._is_open(state, now):
            return
        heaps = self._open.setdefault(state.spec.pool, {}).setdefault(state.long_prefills, ([], []))
        heap = heaps[_EMPTY if self._backpressure.has_empty_queue(state) else _QUEUED]
        heapq.heappush(heap, (-state.free_tokens, state.order, state.version, state))
        if len(heap) > 64 and len(heap) > 4 * len(self._replicas):
            heap[:] = [entry for entry in heap if entry[2] == entry[3].version]
            heapq.heapify(heap)

    def _count_received(self, state: ReplicaState, report: ReplicaReport) -> None:
        # The first report sets the mark: a new scheduler does not know what came before it. A count that
        # falls back is a replica that started anew under its old name.
        if state.received is not None and report.received >= state.received:
            state.unseen = max(0, state.unseen - (report.received - state.received))
        state.received = report.received

    def _settle(self, state: ReplicaState) -> None:
        # What has started has been seen, whatever the counts say; this also mends counts that have drifted
        # because a request was lost on its way.
        state.unseen = min(state.unseen, state.unstarted)

    def _forget_if_done(self, state: ReplicaState) -> None:
        if not state.joined and state.in_flight == 0:
            del self._replicas[state.spec.replica_id]

    def _measure_context_limits(self) -> None:
        limits: dict[str, int] = {}
        for state in self._replicas.values():
            if state.joined:
                pool, limit = state.spec.pool, state.spec.max_model_len
                limits[pool] = min(limit, limits.get(pool, limit))
        self._context_limits = limits


def _unknown_spec(replica_id: str) -> ReplicaSpec:
    return ReplicaSpec(replica_id=replica_id, pool="", max_model_len=1, kv_tokens=1, max_num_seqs=1)


def _moved(counts: tuple[int, int], prefill_class: PrefillClass, by: int) -> tuple[int, int]:
    """The counts when one prefill of that class begins or ends."""
    long, longest = counts
    return long + by * (prefill_class >= PrefillClass.LONG), longest + by * (
        prefill_class is PrefillClass.LONGEST
    )
