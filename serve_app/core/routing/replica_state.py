"""The state of one replica in the ledger: its limits, its last report, its holds and its reservation."""

import enum
import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.core.routing.kv_forecast import KvForecast, KvUse
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

# vLLM's default; only used to predict waits until the actual size is learned.
_LIKELY_NUM_SEQS = 256
_NO_PREFILLS = (0, 0)
_RECENT_STARTS = 64


class PrefillClass(enum.IntEnum):
    """Class of a prefill by learned length boundaries. Prefill isolation limits those above `SHORT`."""

    SHORT = 0
    LONG = 1
    LONGEST = 2


class Hold(NamedTuple):
    """The hold of one running request on a replica.

    Attributes:
        tokens: expected use of the KV cache at its end.
        prefill_class: class of its prefill until that ends; `SHORT` afterwards.
        prefill_tokens: prompt tokens to compute until its prefill ends; 0 afterwards.
        quarantined: whether an engine was lost under the request before, and its answer has not started.
        use: its use of the KV cache over time; None before its dispatch.
    """

    tokens: int
    prefill_class: PrefillClass = PrefillClass.SHORT
    prefill_tokens: int = 0
    quarantined: bool = False
    use: KvUse | None = None

    def without_prefill(self) -> "Hold":
        """Return what remains held after the prefill."""
        return Hold(self.tokens, quarantined=self.quarantined, use=self.use)


# About as many as engines are configured to hold in GPU memory; vLLM's default is one.
_MAX_RECENT_ADAPTERS = 4


@dataclass(slots=True, eq=False)
class ReplicaState:
    """One replica in the ledger.

    Attributes:
        order: number of its last dispatch or, before one, of its joining. It breaks ties, so that equals take
            turns.
        joined: whether it is connected. A lost replica remains until its last request has been released.
        lost_at: when it was lost; infinite while it is connected.
        suspended: whether it gets no requests until its first report at or after `suspended_until`.
        suspensions: number of suspensions since it last started an answer.
        faults: consecutive requests that failed through its fault (see `dispatch.in_flight`).
        quarantined: requests in quarantine whose answer has not started.
        unstarted: requests whose answer has not started.
        long_prefills: prefills in flight above `SHORT`, and how many of them are `LONGEST`.
        dispatches_reported: `dispatches` at its last report.
        unseen: requests sent that its last report cannot include.
        shared_tokens: tokens of common prefixes that its requests count more than once.
        reserved_tokens: tokens reserved for one queued request (`dispatch.dispatcher`).
        tpot_s: the last reported time per output token; None before the first.
        least_tpot_s: the least of these since it joined.
        gated: whether its last reports show overload, whatever its queue.
        version: changes with its capacity; see `OpenReplicas`.
        batch: learns its batch size; None if that is reported.
        context: learns its context limit; None if that is reported.
        pace: measures its time per output token from answers; used while none is reported.
        speed: its speed, compared with the other replicas of its pool.
        hang_detector: detects whether it hangs.
        observed: learns its limit from its answers; used while it does not report its queue. None if its
            batch size is known.
        first_tokens_s: seconds from dispatch to first token of its recent streamed answers.
        interference: learns whether long prefills delay its other requests; used like `observed`.
        recent_adapters: LoRA adapters of its recent requests, the last one first.
    """

    spec: ReplicaSpec
    order: int
    starts: DecayingRate
    kv_budget: int
    joined: bool = True
    lost_at: float = math.inf
    stale: bool = False
    suspended: bool = False
    suspended_until: float = 0.0
    suspensions: int = 0
    faults: int = 0
    quarantined: int = 0
    in_flight: int = 0
    unstarted: int = 0
    unseen: int = 0
    held_tokens: int = 0
    kv: KvForecast = field(default_factory=KvForecast)
    kv_at: float = 0.0
    peak_tokens: int = 0
    shared_tokens: int = 0
    reserved_tokens: int = 0
    long_prefills: tuple[int, int] = (0, 0)
    dispatches: int = 0
    dispatches_reported: int = 0
    pending_prefill_tokens: int = 0
    long_prefill_tokens: int = 0
    tpot_s: float | None = None
    least_tpot_s: float = math.inf
    gated: bool = False
    report: ReplicaReport | None = None
    reported_at: float = 0.0
    report_gap_s: float = 0.0
    version: int = 0
    received: int | None = None
    batch: LearnedBatch | None = None
    hang_detector: HangDetector = field(default_factory=HangDetector)
    context: LearnedContext | None = None
    pace: MeasuredPace = field(default_factory=MeasuredPace)
    speed: ReplicaSpeed = field(default_factory=ReplicaSpeed)
    observed: LearnedLimit | None = None
    first_tokens_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STARTS))
    interference: PrefillInterference = field(default_factory=PrefillInterference)
    recent_adapters: tuple[str, ...] = ()

    def record_adapter(self, adapter: str) -> None:
        """Record a request for a LoRA adapter."""
        others = [each for each in self.recent_adapters if each != adapter]
        self.recent_adapters = (adapter, *others[: _MAX_RECENT_ADAPTERS - 1])

    @property
    def context_limit(self) -> int:
        """The longest request for it in tokens, reported or learned; `UNREPORTED_CONTEXT` while unknown."""
        learned = None if self.context is None else self.context.limit_tokens
        return self.spec.max_model_len if learned is None else learned

    @property
    def is_alive(self) -> bool:
        """True if it is connected, reports its load and does not drain."""
        report = self.report
        return self.joined and report is not None and not (report.draining or self.stale)

    @property
    def is_usable(self) -> bool:
        """True if it accepts requests, even if it has no capacity now."""
        # As `is_alive`, inlined because it is evaluated many times per request.
        report = self.report
        is_alive = self.joined and report is not None and not (report.draining or self.stale)
        return is_alive and not self.suspended and not (self.hang_detector.hangs and self.in_flight)

    @property
    def free_tokens(self) -> int:
        """KV tokens that remain at the peak of the forecast, without those that are reserved."""
        return self.kv_budget - self.peak_tokens - self.reserved_tokens

    @property
    def max_num_seqs(self) -> int | None:
        """Its batch size, reported or learned; None while it is unknown."""
        if self.spec.max_num_seqs is not None or self.batch is None:
            return self.spec.max_num_seqs
        if self.observed is not None and not self.reports_queue:
            return None if self.observed.counts_unstarted else self.observed.limit
        return self.batch.size

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
        if self.reports_queue or self.interference.is_shown:
            return self.long_prefills
        return _NO_PREFILLS

    @property
    def learned_limit(self) -> LearnedLimit | None:
        """Learns its limit from its answers; None if its queue or its batch size is known."""
        return None if self.reports_queue else self.observed

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
        marks += "".join(f" {name}" for name in ("stale", "suspended") if getattr(self, name))
        return (
            f"<Replica {self.spec.replica_id} {self.spec.pool} in_flight={self.in_flight} "
            f"unstarted={self.unstarted} held={self.held_tokens}/{self.kv_budget}{marks}>"
        )
