"""Latency targets of requests: what they change in order, placement and admission.

A target limits the time to the first token (TTFT) and the time per output token (TPOT) of one request. The
expected time from a dispatch to the first token is the learned time of all prefills that the replica computes
until then, times a ratio that is learned from earlier targets as a distribution (`outlook.spread`).

- **Order.** A request has a *latest dispatch*: its limit less its own prefill, at the low end of that
  distribution. Its usual place often serves it in time, at no price for others. When half of its limit has
  passed, less the high end, it is *urgent*, and precedes other requests of equal claim, the earliest latest
  dispatch first. After its latest dispatch it cannot meet its target, and counts as a request without one. So
  it cannot make others miss theirs, and an impossible target gains nothing.
- **Placement.** A request goes to the usual replica if its targets are met there, and those of the requests
  that run there. Otherwise, of the replicas on which they are, to the one with the earliest first token; if
  there is none, to the usual one. A TPOT target thus keeps other requests, and chunks of long prefills, away
  from a replica while others have capacity. It never leaves capacity unused, because its tenant could then
  take more than a fair share.
- **Admission.** A request that asks for it is rejected on arrival if its chance to miss a limit is above
  `refuse_above`. It is the share of earlier targets whose actual TTFT exceeded the expected one by more than
  this limit does (`MissChance`). The delay in `Retry-After` is that after which the chance is expected to
  be low enough.

Without targets nothing here affects a decision.

Source: ours. The latest dispatch is that of earliest deadline first with known service times; dropping the
precedence of late requests prevents its collapse in overload (Locke, "Best-effort decision making for
real-time scheduling", 1986).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Annotated

from serve_app.core.dispatch.backfill import Backfill
from serve_app.core.outlook.spread import Quantiles, RatioSpread, RatioSpreads
from serve_app.core.queueing.expiry import ExpiryHeap
from serve_app.core.request import ScheduledRequest, TargetState
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.routing.replica_state import PrefillClass, ReplicaState
from serve_app.core.settings_base import FINITE_POSITIVE, INNER_SHARE, settings
from serve_app.request import MAX_TARGET_S, LatencyTarget, PriorityClass, completed

# Ratios before enough were observed.
_PRIOR = Quantiles(0.5, 1.0, 2.0)
# Share of its limit that an urgent request has left for its wait.
_URGENT_SHARE = 0.5
# Observations after which a distribution is used, and after which a chance can refuse.
_MIN_OBSERVATIONS = 20
# Without an outcome of a likely miss for this long, one request is admitted as a probe, as in
# `admission.wait_prediction`.
_PROBE_INTERVAL_S = 10.0
_TELLING = 0.25


@settings
class TargetLimits:
    """The latency target of requests that state none, in seconds."""

    # Time to the first token; null for no limit.
    ttft_s: Annotated[float | None, FINITE_POSITIVE] = None
    # Time per output token after the first; null for no limit.
    tpot_s: Annotated[float | None, FINITE_POSITIVE] = None
    # Reject a request that is expected to miss a limit.
    refuse: bool = False

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and value > MAX_TARGET_S:
                raise ValueError(f"{name} must be at most {MAX_TARGET_S:.0f} (one day), got {value}")
        if self.refuse and self.ttft_s is None and self.tpot_s is None:
            raise ValueError("refuse needs a limit: set ttft_s, tpot_s or both")

    @property
    def limits(self) -> LatencyTarget | None:
        """The target; None if the class has no limit."""
        if self.ttft_s is None and self.tpot_s is None:
            return None
        return LatencyTarget(ttft_s=self.ttft_s, tpot_s=self.tpot_s, refuse=self.refuse)


@settings(block="latency_targets")
class LatencyTargetSettings:
    """Latency targets by class, and the chance of a miss above which a request is refused."""

    interactive: TargetLimits = field(default_factory=TargetLimits)
    default: TargetLimits = field(default_factory=TargetLimits)
    batch: TargetLimits = field(default_factory=TargetLimits)
    # Chance to miss a limit above which a request that asks for it is refused on arrival. A lower chance
    # refuses more requests that would have met it.
    refuse_above: Annotated[float, INNER_SHARE] = 0.5

    def of(self, priority: PriorityClass) -> LatencyTarget | None:
        """Return the target of a class, or None."""
        target: TargetLimits = getattr(self, priority.value)
        return target.limits


class MissChance(RatioSpread):
    """The chance of a late first token by its expected share of the limit, learned from outcomes.

    It is the share of outcomes whose actual over expected TTFT is above the limit over the expected TTFT. The
    prior expects the first token exactly when predicted, with the weight of two outcomes.
    """

    __slots__ = ("seen_at",)

    def __init__(self) -> None:
        super().__init__()
        self.seen_at = -math.inf
        for _ in range(2):
            self.add(1.0)

    def learn(self, ratio: float, share: float, now: float) -> None:
        """Add an outcome."""
        self.add(ratio)
        # A likely success says nothing about refusals.
        if self.chance(share) > _TELLING:
            self.seen_at = now

    def chance(self, share: float) -> float:
        """Return the chance of a miss."""
        return self.above(1.0 / share)

    def limit(self, chance: float) -> float:
        """Return the highest expected share of the limit at which the chance is not above another one."""
        return 1.0 / self.quantile(1.0 - chance)


def _latest_at(scheduled: ScheduledRequest) -> float:
    return math.inf if scheduled.target is None else scheduled.target.latest_at


def _share(target: TargetState) -> float | None:
    if target.expected_s is None or target.limits.ttft_s is None:
        return None
    return target.expected_s / target.limits.ttft_s


class _WorkByTime:
    """Sums of tokens by time and class: a binary indexed tree per class (Fenwick 1994).

    Times count in tenths of a second. A sum takes as long with ten thousand requests as with ten.
    """

    _STEPS_PER_S, _PLACES = 10.0, 1 << 34

    def __init__(self) -> None:
        # Sparse: places of queued requests only.
        self._trees: dict[int, dict[int, int]] = {}

    def add(self, rank: int, at: float, tokens: int) -> None:
        """Add tokens of a class at a time; negative to remove them."""
        tree, place = self._trees.setdefault(rank, {}), self._place(at)
        while place <= self._PLACES:
            if (total := tree.get(place, 0) + tokens) != 0:
                tree[place] = total
            else:
                tree.pop(place, None)
            place += place & -place

    def until(self, rank: int, at: float) -> int:
        """Return the tokens of a class and those before it, up to a time."""
        total, last = 0, self._place(at)
        for of_rank, tree in self._trees.items():
            place = last if of_rank <= rank else 0
            while place > 0:
                total += tree.get(place, 0)
                place -= place & -place
        return total

    def _place(self, at: float) -> int:
        return int(min(max(1.0, at * self._STEPS_PER_S + 1.0), self._PLACES))


class LatencyTargets:
    """Predicts first tokens, and compares replicas with the targets of requests.

    Attributes:
        paced: limits on TPOT of the running requests by replica, of those that had a chance to be met.
    """

    def __init__(
        self,
        settings: LatencyTargetSettings,
        ledger: ReplicaLedger,
        costs: PrefillCosts,
        backfill: Backfill,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._costs = costs
        self._backfill = backfill
        self._by_class = {priority: settings.of(priority) for priority in PriorityClass}
        # Actual over expected times from dispatch to first token, by pool and whether the prefill is long.
        self._from_dispatch = RatioSpreads(_PRIOR, _MIN_OBSERVATIONS)
        # By class and whether the prefill is long.
        self._chances: dict[tuple[int, bool], MissChance] = {}
        self._late = ExpiryHeap(_latest_at)
        self._work = _WorkByTime()
        self.paced: dict[str, dict[ScheduledRequest, float]] = {}

    def __repr__(self) -> str:
        return f"<LatencyTargets {self._chances}, paced replicas {sorted(self.paced)}>"

    # A request, from its arrival to its first token.

    def on_arrival(self, scheduled: ScheduledRequest) -> None:
        """Give a new request its target: its own, with the limits of its key and class that it lacks."""
        submission = scheduled.request.submission
        of_key = None if submission.key is None else submission.key.target
        limits = completed(submission.target, completed(of_key, self._by_class[submission.priority]))
        if limits is None or (limits.ttft_s is None and limits.tpot_s is None):
            return
        ttft_s = math.inf if limits.ttft_s is None else limits.ttft_s
        scheduled.target = TargetState(limits, scheduled.request.arrived_at + ttft_s)

    def expect(self, scheduled: ScheduledRequest, tokens_per_s: float, *, waits: bool) -> float | None:
        """Return the expected TTFT of a request that has just arrived; None if no replica is usable.

        Args:
            tokens_per_s: rate at which the queue drains; 0 while it is unknown.
            waits: whether it has to wait for capacity: then until the more urgent requests with a target have
                been dispatched.
        """
        target = scheduled.target
        assert target is not None, "it has a target"
        usable = [each for each in self._ledger.of_pool(scheduled.pools[0]) if each.is_usable]
        if not usable:
            return None
        if waits:
            target.wait_s = self._wait_s(scheduled, tokens_per_s)
        first_token_s = min(self.first_token_s(each, scheduled.prefill_tokens) for each in usable)
        target.expected_s = target.wait_s + first_token_s
        if (share := _share(target)) is not None:
            target.chance = self._chance_of(scheduled).chance(share)
        return target.expected_s

    def least_s(self, scheduled: ScheduledRequest) -> float:
        """Return the expected time of its prefill on an idle replica, in seconds."""
        return self._costs.of(scheduled.pools[0]).seconds(scheduled.prefill_tokens)

    def before_enqueue(self, scheduled: ScheduledRequest) -> None:
        """Set the times by which a request must be dispatched."""
        target = scheduled.target
        if target is None or target.limits.ttft_s is None:
            return
        own_s = self.least_s(scheduled)
        ratios = self._dispatch_ratios(scheduled.pools[0], scheduled.prefill_class)
        target.latest_at = target.due_at - ratios.low * own_s
        target.urgent_at = target.due_at - _URGENT_SHARE * target.limits.ttft_s - ratios.high * own_s
        self._late.add(scheduled)
        target.tokens = scheduled.estimate.expected_tokens
        self._work.add(scheduled.request.priority.rank, target.latest_at, target.tokens)

    def pop_late(self, now: float) -> Iterator[ScheduledRequest]:
        """Yield the queued requests whose latest dispatch has passed, each once."""
        for scheduled in self._late.pop_expired(now):
            self.on_dequeue(scheduled)
            yield scheduled

    def on_dequeue(self, scheduled: ScheduledRequest) -> None:
        """Remove the work of a request that has left the queue, or its precedence there."""
        target = scheduled.target
        if target is not None and target.tokens:
            self._work.add(scheduled.request.priority.rank, target.latest_at, -target.tokens)
            target.tokens = 0

    def on_dispatch(self, scheduled: ScheduledRequest, replica: ReplicaState) -> None:
        """Predict the first token of a request, before its replica holds it, and pace the replica."""
        target = scheduled.target
        assert target is not None, "it has a target"
        target.sent_s = self.first_token_s(replica, scheduled.prefill_tokens)
        tpot_s = target.limits.tpot_s
        if tpot_s is not None and self._keeps_pace(replica, tpot_s):
            self.paced.setdefault(replica.spec.replica_id, {})[scheduled] = tpot_s
        target.latest_at = target.urgent_at = math.inf

    def on_first_token(self, scheduled: ScheduledRequest, replica: ReplicaState, now: float) -> None:
        """Learn from the first token of an answer."""
        target = scheduled.target
        assert target is not None, "it has a target"
        if target.is_met is not None or not scheduled.request.spec.streamed:
            return
        if target.sent_s:
            ratio = (now - scheduled.dispatched_at) / target.sent_s
            is_long = scheduled.prefill_class is not PrefillClass.SHORT
            self._from_dispatch.add(ratio, (replica.spec.pool, is_long))
        self._learn_outcome(scheduled, now, is_met=now <= target.due_at)

    def on_end(self, scheduled: ScheduledRequest, now: float) -> None:
        """Learn from a request whose first token was due, but did not come before its end."""
        target = scheduled.target
        assert target is not None, "it has a target"
        if now > target.due_at and scheduled.request.spec.streamed:
            self._learn_outcome(scheduled, now, is_met=False)

    def _learn_outcome(self, scheduled: ScheduledRequest, now: float, *, is_met: bool) -> None:
        target = scheduled.target
        assert target is not None, "it has a target"
        if target.is_met is not None or target.limits.ttft_s is None:
            return
        target.is_met = is_met
        if (share := _share(target)) is not None and not scheduled.attempts.put_backs:
            assert target.expected_s is not None, "it has a share"
            ratio = (now - scheduled.request.arrived_at) / target.expected_s
            self._chance_of(scheduled).learn(ratio, share, now)

    def on_release(self, scheduled: ScheduledRequest, replica_id: str) -> None:
        """Remove a request that has left its replica."""
        of_replica = self.paced.get(replica_id)
        if of_replica is not None and of_replica.pop(scheduled, None) is not None and not of_replica:
            del self.paced[replica_id]

    # Predictions.

    def first_token_s(self, replica: ReplicaState, prefill_tokens: int) -> float:
        """Return the time from a dispatch to its first token by the learned cost of prefills, in seconds.

        The prefills in flight are computed before, except long ones that the engine computes in chunks beside
        others.
        """
        cost, spec = self._costs.of(replica.spec.pool), replica.spec
        pending = replica.prefills.tokens
        if spec.long_prefill_token_threshold:
            pending -= replica.prefills.long_tokens
        return replica.speed.ratio * cost.seconds(prefill_tokens + pending)

    def longest_expected_s(self, scheduled: ScheduledRequest) -> float | None:
        """Return the longest expected TTFT with which a request is not refused.

        None without a limit on it, or if too few outcomes are known.
        """
        target, chance = scheduled.target, self._chance_of(scheduled)
        if target is None or target.limits.ttft_s is None or chance.count < _MIN_OBSERVATIONS:
            return None
        return target.limits.ttft_s * chance.limit(self._settings.refuse_above)

    def is_probe(self, scheduled: ScheduledRequest, now: float) -> bool:
        """Return whether a request that would be refused is admitted, to see whether that is still right."""
        chance = self._chance_of(scheduled)
        if now - chance.seen_at <= _PROBE_INTERVAL_S:
            return False
        chance.seen_at = now
        return True

    def _wait_s(self, scheduled: ScheduledRequest, tokens_per_s: float) -> float:
        """Return the time in which more urgent requests with a target are dispatched, in seconds."""
        target = scheduled.target
        assert target is not None, "it has a target"
        if not tokens_per_s > 0:
            return 0.0
        rank, latest_at = scheduled.request.priority.rank, target.due_at - self.least_s(scheduled)
        return self._work.until(rank, latest_at) / tokens_per_s

    def _chance_of(self, scheduled: ScheduledRequest) -> MissChance:
        is_long = scheduled.prefill_class is not PrefillClass.SHORT
        return self._chances.setdefault((scheduled.request.priority.rank, is_long), MissChance())

    def expected_tpot_s(self, scheduled: ScheduledRequest) -> float | None:
        """Return the least time per output token on any replica of its pool; None if it is unknown."""
        usable = [each for each in self._ledger.of_pool(scheduled.pools[0]) if each.is_usable]
        return min(
            (seconds for each in usable if (seconds := self._expected_iteration_s(each)) is not None),
            default=None,
        )

    def _expected_iteration_s(self, replica: ReplicaState) -> float | None:
        learned_s = self._backfill.iteration_s(replica.spec.pool, replica.in_flight + 1)
        if learned_s is None or replica.in_flight or replica.tpot_s is None:
            return learned_s
        # A single sequence is not slower than those of the last report.
        return min(learned_s, replica.tpot_s)

    def is_pace_probe(self, scheduled: ScheduledRequest, now: float) -> bool:
        """Return whether a request is admitted although it would be too slow: a probe of an idle pool.

        While requests run, their reports correct the expected time per output token.
        """
        is_busy = any(each.in_flight for each in self._ledger.of_pool(scheduled.pools[0]))
        return not is_busy and self.is_probe(scheduled, now)

    # Placement.

    def affects(self, head: ScheduledRequest) -> bool:
        """Return whether targets may change the replica of a request."""
        return head.target is not None or bool(self.paced)

    def are_met(self, head: ScheduledRequest, replica: ReplicaState, prefill_tokens: int, now: float) -> bool:
        """Return whether a request meets its targets on this replica, and the others there meet theirs."""
        target, limits_s = head.target, self.paced.get(replica.spec.replica_id)
        pool = replica.spec.pool
        if target is not None:
            ratio = self._dispatch_ratios(pool, head.prefill_class).middle
            if now + ratio * self.first_token_s(replica, prefill_tokens) > target.due_at:
                return False
            tpot_s = target.limits.tpot_s
            if tpot_s is not None and not self._keeps_pace(replica, tpot_s):
                return False
        return limits_s is None or self._leaves_pace(replica, limits_s.values(), prefill_tokens)

    def _leaves_pace(self, replica: ReplicaState, limits_s: Iterable[float], prefill_tokens: int) -> bool:
        """Return whether one more request lets the running ones have their time per output token."""
        tightest_s, spec = min(limits_s), replica.spec
        chunk = spec.long_prefill_token_threshold or spec.max_num_batched_tokens or prefill_tokens
        prefill_s = self._costs.of(spec.pool).per_token_s * min(chunk, prefill_tokens)
        decode_s = self._backfill.iteration_s(spec.pool, replica.in_flight + 1)
        return decode_s is None or max(decode_s, prefill_s) <= tightest_s

    def _keeps_pace(self, replica: ReplicaState, tpot_s: float) -> bool:
        expected_s = self._backfill.iteration_s(replica.spec.pool, replica.in_flight + 1)
        return expected_s is None or expected_s <= tpot_s

    def _dispatch_ratios(self, pool: str, prefill_class: PrefillClass) -> Quantiles:
        return self._from_dispatch.quantiles((pool, prefill_class is not PrefillClass.SHORT))
