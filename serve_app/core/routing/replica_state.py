"""The state of one replica in the ledger: its limits, its last report, its holds and its reservation.

`KvForecast` is the KV cache that its running requests (`Running`) will use at most. Each one grows by one
token per iteration until its answer ends, and then frees all its blocks. So the use of the cache has its peak
at the end of some answer, when the others have grown and few have ended. Holding each request's *final* size
instead would leave unused what its answer has not reached yet, and holding its current size would preempt.

The length of an answer is a distribution, of which `OutputEstimate.ends` gives some equally likely points. A
point weighs its share of the request:

    use(c) = sum over the points at or after c of  weight * (prompt + choices * (c - start))
    peak = max over the points c of use(c)

where `c` counts iterations of the replica. An answer that outlives a point counts at its later ones, and
after the last one at new points, those of answers of at least its age. `spread` is the standard deviation of
the sum of all final sizes, from which the ledger takes its margin: it is large if nothing is known, and 0 if
the lengths are known.

Requests with a common prefix use its blocks together. So what the engine reports less than the sum, at most
the prefixes that were cached, is subtracted.

Source: the peak of future memory of Past-Future scheduling (Gong et al., ASPLOS 2025), which samples one
length per request. The points instead of samples, and the margin, are ours.
"""

import bisect
import enum
import math
from collections import deque
from dataclasses import dataclass, field

from serve_app.core.accounting.wait_causes import EngineShare
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.observed import (
    HangDetector,
    LearnedBatch,
    LearnedContext,
    LearnedLimit,
    MeasuredPace,
    PrefillInterference,
)
from serve_app.core.routing.prefill_cost import DecayingRate, ReplicaSpeed
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec

# Points are rounded to an eighth of the distance, so that a replica has few different ones.
_STEPS_PER_LENGTH = 8
# A point is at least this many iterations away, so that an answer at its limit is not moved at each of them.
_NEAREST = 8.0
# A sequence leaves half of its last block unused, on average.
_HALF_BLOCK = 8


class KvUse:
    """The expected use of the KV cache by one running request.

    Attributes:
        pool: the pool of its replica when it was dispatched.
        start: iteration of the replica at which its answer began.
        points: iterations at which it may end, with the probability of each.
        variance: variance of its final size, in tokens squared.
        cached_tokens: prompt tokens that its replica had cached at its dispatch.
        started: whether its answer has started.
    """

    __slots__ = (
        "cached_tokens",
        "choices",
        "estimate",
        "points",
        "pool",
        "prompt_tokens",
        "start",
        "started",
        "variance",
    )

    def __init__(self, estimate: TokenEstimate, choices: int, pool: str, cached_tokens: int = 0) -> None:
        self.estimate = estimate
        self.pool = pool
        self.cached_tokens = cached_tokens
        self.started = False
        self.prompt_tokens = estimate.expected_prompt_tokens + _HALF_BLOCK * choices
        self.choices = choices
        self.start = 0.0
        self.points: dict[int, float] = {}
        self.variance = 0.0

    def __repr__(self) -> str:
        return (
            f"<KvUse {self.prompt_tokens} + {self.choices} * (clock - {self.start:.0f}), ends {self.points}>"
        )


class KvForecast:
    """The expected use of one replica's KV cache.

    It is `active` only while the cache may fill up. Otherwise it records when answers began, which costs next
    to nothing.

    Attributes:
        clock: iterations of the replica since it joined.
        shared_tokens: tokens of common prefixes that its requests count more than once, as last reported.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.active = False
        self.shared_tokens = 0
        self._advanced_at = 0.0
        self._uses: dict[KvUse, None] = {}
        self._points: list[int] = []
        # By point: the weighted sum of choices, and of what the prompts would use at iteration 0.
        self._slope: dict[int, float] = {}
        self._base: dict[int, float] = {}
        self._members: dict[int, dict[KvUse, None]] = {}
        self._variance = 0.0

    def __repr__(self) -> str:
        return f"<KvForecast of {len(self._uses)} clock={self.clock:.0f} peak={self.peak()}>"

    @property
    def spread(self) -> float:
        """Standard deviation of the sum of all final sizes, in tokens."""
        return math.sqrt(max(0.0, self._variance))

    def activate(self) -> None:
        """Compute the points of all running requests from now on."""
        if not self.active:
            self.active = True
            for use in self._uses:
                self._insert(use)

    def deactivate(self) -> None:
        """Drop all points."""
        if self.active:
            self.active = False
            for use in self._uses:
                use.points = {}
            self._points = []
            self._slope, self._base, self._members, self._variance = {}, {}, {}, 0.0

    def add(self, use: KvUse) -> None:
        """Add a request whose answer begins now."""
        use.start = self.clock
        self._uses[use] = None
        if self.active:
            self._insert(use)

    def remove(self, use: KvUse) -> None:
        """Remove a request that has ended."""
        del self._uses[use]
        base = use.prompt_tokens - use.choices * use.start
        for point, weight in use.points.items():
            members = self._members[point]
            del members[use]
            if members:
                self._slope[point] -= weight * use.choices
                self._base[point] -= weight * base
            else:
                del self._members[point], self._slope[point], self._base[point]
                del self._points[bisect.bisect_left(self._points, point)]
        # Rounding errors do not outlast a time without requests.
        self._variance = self._variance - use.variance if self._points else 0.0
        use.points, use.variance = {}, 0.0

    def advance(self, now: float, tpot_s: float) -> None:
        """Move the clock. The share of a passed point goes to the later points of its request.

        Args:
            tpot_s: seconds for an iteration.
        """
        self.clock += (now - self._advanced_at) / tpot_s
        self._advanced_at = now
        while self._points and self._points[0] <= self.clock:
            passed = self._points.pop(0)
            del self._slope[passed], self._base[passed]
            for use in self._members.pop(passed):
                weight = use.points.pop(passed)
                if not use.points:
                    self._variance -= use.variance
                    self._insert(use)
                    continue
                share = weight / len(use.points)
                slope, base = share * use.choices, share * (use.prompt_tokens - use.choices * use.start)
                for point in use.points:
                    use.points[point] += share
                    self._slope[point] += slope
                    self._base[point] += base

    def used(self) -> int:
        """Return the use of the cache now, in tokens. It takes time in proportion to the requests."""
        return round(sum(use.prompt_tokens + use.choices * (self.clock - use.start) for use in self._uses))

    def observe(self, reported_tokens: int) -> None:
        """Learn how many tokens count more than once here, because requests share a prefix.

        Args:
            reported_tokens: the use of the cache as the engine reports it.
        """
        started = [use for use in self._uses if use.started]
        used = sum(use.prompt_tokens + use.choices * (self.clock - use.start) for use in started)
        cached_tokens = sum(use.cached_tokens for use in started)
        self.shared_tokens = max(0, min(cached_tokens, round(used) - reported_tokens))

    def peak(self) -> int:
        """Return the highest expected use from now on, in tokens."""
        slope = base = highest = 0.0
        slopes, bases = self._slope, self._base
        for point in reversed(self._points):
            slope += slopes[point]
            base += bases[point]
            use = base + slope * point
            highest = max(highest, use)
        return math.ceil(highest)

    def _insert(self, use: KvUse) -> None:
        output = use.estimate.output
        # The clock is an estimate. No answer is longer than its limit.
        age = min(self.clock - use.start, output.longest)
        use.start = self.clock - age
        ends = output.ends(age)
        weight = 1.0 / len(ends)
        mean = weight * sum(ends)
        use.variance = use.choices * weight * sum((end - mean) ** 2 for end in ends)
        self._variance += use.variance
        use.points = {}
        for end in ends:
            point = _rounded(use.start + end, self.clock)
            use.points[point] = use.points.get(point, 0.0) + weight
        base = use.prompt_tokens - use.choices * use.start
        for point, share in use.points.items():
            if point not in self._members:
                self._members[point] = {}
                self._slope[point] = self._base[point] = 0.0
                bisect.insort(self._points, point)
            self._members[point][use] = None
            self._slope[point] += share * use.choices
            self._base[point] += share * base


def _rounded(at: float, clock: float) -> int:
    """Return an iteration after `clock`, rounded relative to its distance."""
    distance = max(_NEAREST, at - clock)
    step = 1 << max(0, int(distance / _STEPS_PER_LENGTH).bit_length() - 1)
    point = round((clock + distance) / step) * step
    return point if point > clock else point + step


# vLLM's default; only used to predict waits until the actual size is learned.
_LIKELY_NUM_SEQS = 256
_NO_PREFILLS = (0, 0)
_RECENT_STARTS = 64


class PrefillClass(enum.IntEnum):
    """Class of a prefill by learned length boundaries. Prefill isolation limits those above `SHORT`."""

    SHORT = 0
    LONG = 1
    LONGEST = 2


# About as many as engines are configured to hold in GPU memory; vLLM's default is one.
_MAX_RECENT_ADAPTERS = 4


@dataclass(slots=True, eq=False)
class Suspension:
    """Suspension of a replica that fails requests; see `dispatch.in_flight`.

    Attributes:
        active: whether it gets no requests until its first report at or after `until`.
        count: suspensions since it last started an answer.
        faults: consecutive requests that failed through its fault.
    """

    active: bool = False
    until: float = 0.0
    count: int = 0
    faults: int = 0


@dataclass(slots=True, eq=False)
class PendingPrefills:
    """The prefills in flight on a replica.

    Attributes:
        tokens: prompt tokens that they compute.
        long_tokens: those of prefills above `SHORT`.
        long: prefills above `SHORT`, and how many of them are `LONGEST`.
    """

    tokens: int = 0
    long_tokens: int = 0
    long: tuple[int, int] = (0, 0)

    def count(self, running: "Running", by: int) -> None:
        """Count the start (1) or the end (-1) of a prefill."""
        self.tokens += by * running.prefill_tokens
        if running.prefill_class is not PrefillClass.SHORT:
            long, longest = self.long
            self.long = (long + by, longest + by * (running.prefill_class is PrefillClass.LONGEST))
            self.long_tokens += by * running.prefill_tokens


@dataclass(slots=True, eq=False)
class Reports:
    """The reports of a replica: their times, and what is counted over several.

    Attributes:
        stale: whether the last one is too old.
        at: arrival of the last one.
        gap_s: moving average of the time between two.
        received: requests that it has received, as last reported; None if it does not report them.
        dispatches: `ReplicaState.dispatches` at the last one.
        least_tpot_s: the least reported time per output token since it joined.
    """

    stale: bool = False
    at: float = 0.0
    gap_s: float = 0.0
    received: int | None = None
    dispatches: int = 0
    least_tpot_s: float = math.inf


@dataclass(slots=True, eq=False)
class Learned:
    """What is learned about a replica that does not report it.

    Attributes:
        batch: its batch size; None if that is reported.
        context: its context limit; None if that is reported.
        limit: its limit from its answers; used while it does not report its queue. None if its batch size is
            known.
        pace: its time per output token from answers; used while none is reported.
        first_tokens_s: seconds from dispatch to first token of its recent streamed answers.
        interference: whether long prefills delay its other requests; used like `limit`.
    """

    batch: LearnedBatch | None = None
    context: LearnedContext | None = None
    limit: LearnedLimit | None = None
    pace: MeasuredPace = field(default_factory=MeasuredPace)
    first_tokens_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STARTS))
    interference: PrefillInterference = field(default_factory=PrefillInterference)


@dataclass(slots=True, eq=False)
class ReplicaState:
    """One replica in the ledger.

    Attributes:
        order: number of its last dispatch or, before one, of its joining. It breaks ties, so that equals take
            turns.
        lost_at: when it was lost; infinite while it is connected. A lost replica remains until its last
            request has been released.
        quarantined: requests in quarantine whose answer has not started.
        unstarted: requests whose answer has not started.
        unseen: requests sent that its last report cannot include.
        reserved_tokens: tokens reserved for one queued request (`dispatch.dispatcher`).
        tpot_s: the last reported time per output token; None before the first.
        gated: whether its last reports show overload, whatever its queue.
        version: changes with its capacity; see `OpenReplicas`.
        speed: its speed, compared with the other replicas of its pool.
        hang_detector: detects whether it hangs.
        recent_adapters: LoRA adapters of its recent requests, the last one first.
    """

    spec: ReplicaSpec
    order: int
    starts: DecayingRate
    kv_budget: int
    lost_at: float = math.inf
    suspension: Suspension = field(default_factory=Suspension)
    quarantined: int = 0
    in_flight: int = 0
    unstarted: int = 0
    unseen: int = 0
    held_tokens: int = 0
    kv: KvForecast = field(default_factory=KvForecast)
    peak_tokens: int = 0
    reserved_tokens: int = 0
    prefills: PendingPrefills = field(default_factory=PendingPrefills)
    dispatches: int = 0
    tpot_s: float | None = None
    gated: bool = False
    report: ReplicaReport | None = None
    reports: Reports = field(default_factory=Reports)
    version: int = 0
    hang_detector: HangDetector = field(default_factory=HangDetector)
    learned: Learned = field(default_factory=Learned)
    speed: ReplicaSpeed = field(default_factory=ReplicaSpeed)
    recent_adapters: tuple[str, ...] = ()

    def record_adapter(self, adapter: str) -> None:
        """Record a request for a LoRA adapter."""
        others = [each for each in self.recent_adapters if each != adapter]
        self.recent_adapters = (adapter, *others[: _MAX_RECENT_ADAPTERS - 1])

    @property
    def joined(self) -> bool:
        """True if it is connected."""
        return self.lost_at == math.inf

    @property
    def context_limit(self) -> int:
        """The longest request for it in tokens, reported or learned; `UNREPORTED_CONTEXT` while unknown."""
        learned = None if self.learned.context is None else self.learned.context.limit_tokens
        return self.spec.max_model_len if learned is None else learned

    @property
    def is_alive(self) -> bool:
        """True if it is connected, reports its load and does not drain."""
        report = self.report
        return self.joined and report is not None and not (report.draining or self.reports.stale)

    @property
    def is_usable(self) -> bool:
        """True if it accepts requests, even if it has no capacity now."""
        # As `is_alive`, inlined because it is evaluated many times per request.
        report = self.report
        if report is None or report.draining or self.reports.stale or self.lost_at < math.inf:
            return False
        return not (self.suspension.active or (self.hang_detector.hangs and self.in_flight))

    @property
    def free_tokens(self) -> int:
        """KV tokens that remain at the peak of the forecast, without those that are reserved."""
        return self.kv_budget - self.peak_tokens - self.reserved_tokens

    @property
    def max_num_seqs(self) -> int | None:
        """Its batch size, reported or learned; None while it is unknown."""
        learned = self.learned
        if self.spec.max_num_seqs is not None or learned.batch is None:
            return self.spec.max_num_seqs
        if learned.limit is not None and not self.reports_queue:
            return None if learned.limit.counts_unstarted else learned.limit.limit
        return learned.batch.size

    @property
    def likely_num_seqs(self) -> int:
        """Its batch size for predictions; an assumption while it is unknown."""
        known = self.max_num_seqs
        return _LIKELY_NUM_SEQS if known is None else known

    @property
    def reports_queue(self) -> bool:
        """True if its reports include the number of requests queued in the engine."""
        return self.report is None or self.report.waiting is not None

    @property
    def begins_at_once(self) -> bool:
        """True if its engine is expected to begin one more request immediately."""
        limit = self.max_num_seqs
        waits = self.report is not None and bool(self.report.waiting)
        return not waits and (limit is None or self.in_flight < limit)

    @property
    def limited_prefills(self) -> tuple[int, int]:
        """The long prefills in flight that isolation limits: none if they delay no other requests."""
        if self.reports_queue or self.learned.interference.is_shown:
            return self.prefills.long
        return _NO_PREFILLS

    @property
    def learned_limit(self) -> LearnedLimit | None:
        """Learns its limit from its answers; None if its queue or its batch size is known."""
        return None if self.reports_queue else self.learned.limit

    @property
    def reported_queue(self) -> int:
        """Upper bound of the engine's queue: requests queued at its report, plus those sent since.

        If its reports do not include the queue, the requests in flight beyond its batch size.
        """
        waiting = self.report.waiting if self.report else 0
        if waiting is None:
            return max(0, self.in_flight - self.likely_num_seqs)
        return self.unseen + waiting

    def __repr__(self) -> str:
        marks = "" if self.joined else " lost"
        marks += " stale" if self.reports.stale else ""
        marks += " suspended" if self.suspension.active else ""
        return (
            f"<Replica {self.spec.replica_id} {self.spec.pool} in_flight={self.in_flight} "
            f"unstarted={self.unstarted} held={self.held_tokens}/{self.kv_budget}{marks}>"
        )


# Not frozen, because it changes with the request: one instance for each dispatch.
@dataclass(slots=True, eq=False)
class Running:
    """A request on its replica: what it holds there, from its dispatch until it is released.

    Attributes:
        tokens: expected use of the KV cache at its end.
        prefill_class: class of its prefill until that ends; `SHORT` afterwards.
        prefill_tokens: prompt tokens to compute until its prefill ends; 0 afterwards.
        quarantined: whether an engine was lost under the request before, and its answer has not started.
        bypassed: whether it bypassed the queue (see pass-through in `dispatch.dispatcher`).
        is_guaranteed: whether it was dispatched by a floor or starvation bound, so it is not revoked.
        by_floor: whether it was dispatched by the floor of its tenant or class.
        started: whether its answer has started.
        started_at: time of that; None before it, and if an earlier scheduler observed it.
        engine_priority: the priority sent to its engine; None for none.
        number: number of requests sent to the replica by then, this one included.
        prefilled_alone: whether the replica had no other prefill in flight at the dispatch.
        sent_as: requests in flight on the replica, those without a start, both with this one, and the long
            prefills in flight.
        use: its use of the KV cache over time; None before its dispatch.
        share: its account of engine time; None before its dispatch.
    """

    replica: ReplicaState
    tokens: int
    prefill_class: PrefillClass = PrefillClass.SHORT
    prefill_tokens: int = 0
    quarantined: bool = False
    bypassed: bool = False
    is_guaranteed: bool = False
    by_floor: bool = False
    started: bool = False
    started_at: float | None = None
    engine_priority: int | None = None
    number: int = 0
    prefilled_alone: bool = False
    sent_as: tuple[int, int, int] = (0, 0, 0)
    use: KvUse | None = None
    share: EngineShare | None = None
