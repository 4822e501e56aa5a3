"""The ledger: the replicas, with the holds and reservations on each.

A running request *holds* tokens of its replica. A *reservation* sets tokens of a replica aside for one queued
request (`dispatch.capacity_reservations`). Rules:

- The selection of a replica is followed immediately by `hold`, so that the next decision sees the hold.
- `held_tokens == sum of the holds of its running requests`, exactly, at any time. This includes a lost
  replica: its requests are released one by one, as the gateways report how they ended.
- Free tokens count the *expected* needs of requests, so the ledger balances load by work, not by number of
  requests.

`open_replicas` finds the best replica that may accept one more request.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from serve_app.core.routing.context_limits import ContextLimits
from serve_app.core.routing.kv_forecast import KvUse
from serve_app.core.routing.observed.learned_batch import LearnedBatch
from serve_app.core.routing.observed.learned_context import LearnedContext
from serve_app.core.routing.observed.limits import LearnedLimit
from serve_app.core.routing.open_replicas import Backpressure, OpenReplicas, ReplicasByAdapter
from serve_app.core.routing.rate import DecayingRate
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.routing.replica_state import Hold, PrefillClass, ReplicaState
from serve_app.core.routing.speeds import Speeds
from serve_app.request import ANYWHERE, Destination

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
        forecasts_peak: whether running requests count at the peak of their use together (`kv_forecast`);
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
        state.joined, state.lost_at, state.report, state.stale = True, math.inf, None, False
        state.suspended_until, state.suspensions, state.faults = 0.0, 0, 0
        state.least_tpot_s = math.inf
        state.hang_detector.join(spec.stall_timeout_s)
        if not only_adapters_changed:
            # It may be a server that was restarted with another limit.
            unknown = spec.max_num_seqs is None
            state.batch = LearnedBatch() if unknown else None
            state.context = None if spec.has_known_context else LearnedContext()
            state.observed = LearnedLimit() if unknown else None
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
        if state.report is not None:
            gap_s = now - state.reported_at
            state.report_gap_s += _REPORT_GAP_WEIGHT * (gap_s - state.report_gap_s)
        was_stale = state.stale
        state.report, state.reported_at, state.stale = report, now, False
        # Measured paces follow: they include what slow clients and providers take.
        state.gated = self._backpressure.gates(state)
        if report.tpot_s is not None:
            state.tpot_s, state.least_tpot_s = report.tpot_s, min(state.least_tpot_s, report.tpot_s)
        elif state.tpot_s is None and (measured_s := state.pace.tpot_s(now)) is not None:
            state.report = replace(report, tpot_s=measured_s)
        state.suspended = state.suspended and now < state.suspended_until
        if state.batch is not None:
            state.batch.observe(report)
        if report.computes:
            state.hang_detector.on_progress(now)
        if report.kv_usage_ratio is not None and state.spec.kv_tokens is not None:
            state.shared_tokens = state.kv.shared(int(report.kv_usage_ratio * state.spec.kv_tokens))
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
        state.joined, state.lost_at = False, now
        self._fresh.pop(replica_id, None)
        self.open.update(state)
        self._remove_if_done(state)
        self.contexts.update(state)

    def suspend(self, state: ReplicaState, until: float) -> None:
        """Send no requests to a replica until its first report at or after `until`."""
        state.suspended, state.suspended_until = True, until
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
            state.stale = True
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

    def hold(
        self, replica_id: str, hold: Hold, now: float, *, seen: bool = False, started: bool = False
    ) -> None:
        """Hold a part of a replica for one running request.

        Args:
            seen: whether the replica's reports already include the request (it ran before this scheduler
                started).
            started: whether its answer has started.
        """
        state = self._replicas.get(replica_id)
        if state is None:
            # The gateway reconnected before the replica: record the hold without opening the replica.
            state = self._add(_unknown_spec(replica_id), now)
            state.joined, state.lost_at = False, now
        state.order, self._next_order = self._next_order, self._next_order + 1
        state.in_flight += 1
        state.dispatches += not seen
        state.held_tokens += hold.tokens
        if hold.use is not None:
            hold.use.started = started
        self._forecast(state, now, added=hold.use)
        _count_prefill(state, hold, 1)
        state.quarantined += hold.quarantined
        state.unstarted += not started
        state.unseen += not seen
        self.open.update(state)

    def start(self, replica_id: str, hold: Hold, now: float) -> Hold:
        """End the prefill and quarantine of a request whose answer has started. Return its remaining hold."""
        state = self._replicas[replica_id]
        if hold.use is not None:
            hold.use.started = True
        state.unstarted -= 1
        state.quarantined -= hold.quarantined
        _count_prefill(state, hold, -1)
        state.starts.add(1.0, now)
        self._clamp_unseen(state)
        self.open.update(state)
        return Hold(hold.tokens, use=hold.use)

    def end_prefill(self, replica_id: str, hold: Hold) -> None:
        """End the prefill of one hold, observed or assumed."""
        state = self._replicas[replica_id]
        _count_prefill(state, hold, -1)
        self.open.update(state)

    def release(self, replica_id: str, hold: Hold, now: float, *, started: bool, ran: bool = True) -> None:
        """Remove the hold of one request.

        Args:
            started: whether `start` was called for it.
            ran: whether it left the engine's queue, so that it counts for the engine's pace.
        """
        state = self._replicas[replica_id]
        state.in_flight -= 1
        if state.observed is not None:
            state.observed.on_departure(now)
        state.held_tokens -= hold.tokens
        self._forecast(state, now, removed=hold.use)
        state.quarantined -= hold.quarantined
        _count_prefill(state, hold, -1)
        if not started:
            state.unstarted -= 1
            if ran:
                state.starts.add(1.0, now)
        self._clamp_unseen(state)
        if not state.in_flight:
            state.shared_tokens = 0
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
        kv.advance((now - state.kv_at) / (tpot_s or _USUAL_TPOT_S))
        state.kv_at = now
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
        state.peak_tokens = max(0, state.peak_tokens - state.shared_tokens)

    def _count_received(self, state: ReplicaState, report: ReplicaReport) -> None:
        if report.received is None:
            # The report was read after the previous report arrived, so it includes everything sent before
            # that.
            state.unseen = min(state.unseen, state.dispatches - state.dispatches_reported)
            state.dispatches_reported = state.dispatches
            return
        # The first report sets the baseline, because a new scheduler does not know the earlier requests. A
        # count that decreases means that the replica was restarted under the same name.
        if state.received is not None and report.received >= state.received:
            state.unseen = max(0, state.unseen - (report.received - state.received))
        state.received = report.received

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


def _count_prefill(state: ReplicaState, hold: Hold, by: int) -> None:
    """Count the start (1) or the end (-1) of a prefill."""
    state.pending_prefill_tokens += by * hold.prefill_tokens
    if hold.prefill_class is not PrefillClass.SHORT:
        long, longest = state.long_prefills
        state.long_prefills = (long + by, longest + by * (hold.prefill_class is PrefillClass.LONGEST))
        state.long_prefill_tokens += by * hold.prefill_tokens
