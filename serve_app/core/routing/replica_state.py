"""The state of one replica in the ledger: its limits, its last report, and what is reserved of it."""

import enum
from dataclasses import dataclass, field

from serve_app.core.routing.observed import (
    AnswerWatch,
    ConcurrencyLimit,
    LearnedBatch,
    LearnedContext,
    MeasuredPace,
)
from serve_app.core.routing.rate import DecayingRate
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec

# vLLM's default; used only to predict waits, until the real size shows.
_LIKELY_NUM_SEQS = 256


class PrefillClass(enum.IntEnum):
    """How long a prefill is, by learned boundaries; prefill isolation limits the classes above `SHORT`."""

    SHORT = 0
    LONG = 1
    LONGEST = 2


@dataclass(frozen=True, slots=True)
class Hold:
    """What is reserved of a replica for one request.

    Attributes:
        tokens: expected use of the KV cache.
        prefill_class: of its prefill until that ends; `SHORT` afterwards.
        prefill_tokens: prompt tokens to compute until its prefill ends; 0 afterwards.
        quarantined: an engine was lost under the request before, and its answer has not begun.
    """

    tokens: int
    prefill_class: PrefillClass = PrefillClass.SHORT
    prefill_tokens: int = 0
    quarantined: bool = False


# About as many as engines are set up to have in GPU memory; vLLM's own default is one.
_ADAPTERS_AT_HAND = 4


@dataclass(slots=True, eq=False)
class ReplicaState:
    """One replica in the ledger.

    Attributes:
        order: order of joining; breaks ties.
        joined: it is connected; a lost replica stays until its last request has been released.
        suspended: it gets no requests until its first report at or after `suspended_until`.
        suspensions: how often it was suspended since it last began an answer.
        faults: requests in a row that failed through its fault (see `dispatch.in_flight`).
        quarantined: requests in quarantine whose answer has not begun.
        unstarted: requests whose answer has not begun.
        long_prefills: prefills above `SHORT` that have not ended, and how many of them are `LONGEST`.
        dispatches: requests sent to it so far.
        dispatches_reported: `dispatches` at its last report.
        unseen: requests sent that its last report cannot have counted.
        pending_prefill_tokens: prompt tokens of the prefills that have not ended.
        reserved_tokens: kept free for one waiting request (`dispatch.starvation`).
        tpot_s: the last time per output token that it reported; None before it generated anything.
        gated: by its last reports it is too busy for more, whatever its queue.
        version: changes with its capacity; see `open_replicas`.
        batch: its largest batch, learned where it does not state one; None while nothing is known.
        context: its context limit, learned where it does not state one.
        pace: its time per output token as answers show it; counts while it does not report one.
        answers: whether it answers what it is sent.
        concurrency: the limit of requests in flight; counts while it tells neither its queue nor its batch.
        recent_adapters: LoRA adapters that it was sent requests for, the last first.
    """

    spec: ReplicaSpec
    order: int
    starts: DecayingRate
    kv_budget: int
    joined: bool = True
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
    reserved_tokens: int = 0
    long_prefills: tuple[int, int] = (0, 0)
    dispatches: int = 0
    dispatches_reported: int = 0
    pending_prefill_tokens: int = 0
    tpot_s: float | None = None
    gated: bool = False
    report: ReplicaReport | None = None
    reported_at: float = 0.0
    report_gap_s: float = 0.0
    version: int = 0
    received: int | None = None
    batch: LearnedBatch | None = None
    answers: AnswerWatch = field(default_factory=AnswerWatch)
    context: LearnedContext | None = None
    pace: MeasuredPace = field(default_factory=MeasuredPace)
    concurrency: ConcurrencyLimit | None = None
    recent_adapters: tuple[str, ...] = ()

    def note_adapter(self, adapter: str) -> None:
        """It is sent a request for a LoRA adapter."""
        others = [each for each in self.recent_adapters if each != adapter]
        self.recent_adapters = (adapter, *others[: _ADAPTERS_AT_HAND - 1])

    @property
    def context_limit(self) -> int:
        """The longest request for it in tokens, as stated or learned; `UNTOLD_CONTEXT` while unknown."""
        learned = None if self.context is None else self.context.limit_tokens
        return self.spec.max_model_len if learned is None else learned

    @property
    def is_alive(self) -> bool:
        """Whether it is connected, reports and does not drain."""
        report = self.report
        return self.joined and report is not None and not (report.draining or self.stale)

    @property
    def is_usable(self) -> bool:
        """Whether the replica will take requests again, even if it has no capacity for any now."""
        # As `is_alive`, without the call: it is asked for many times in the life of a request.
        report = self.report
        is_alive = self.joined and report is not None and not (report.draining or self.stale)
        return is_alive and not self.suspended and not (self.answers.hangs and self.in_flight)

    @property
    def free_tokens(self) -> int:
        """Unreserved KV tokens; negative while more is kept free for a request than is unreserved."""
        return self.kv_budget - self.held_tokens - self.reserved_tokens

    @property
    def max_num_seqs(self) -> int | None:
        """The size of its batch, as stated or learned; None while it is unknown."""
        stated = self.spec.max_num_seqs
        return self.batch.size if stated is None and self.batch is not None else stated

    @property
    def likely_num_seqs(self) -> int:
        """The size of its batch, for predictions: without anything known, that of most engines."""
        if (known := self.max_num_seqs) is not None:
            return known
        if self.tells_queue or self.concurrency is None:
            return _LIKELY_NUM_SEQS
        return max(1, int(self.concurrency.limit))

    @property
    def tells_queue(self) -> bool:
        """Whether its reports say how many requests wait in the engine."""
        return self.report is None or self.report.waiting is not None

    @property
    def in_flight_limit(self) -> float | None:
        """Requests that it may have in flight, where it tells neither its queue nor its batch; else None."""
        if self.tells_queue or self.concurrency is None or self.max_num_seqs is not None:
            return None
        return self.concurrency.limit

    @property
    def reported_queue(self) -> int:
        """Upper bound on the engine's queue: what waited at its report, and what was sent since.

        Where the report does not say what waits, it is what its batch cannot hold.
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
