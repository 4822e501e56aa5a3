"""The state of one replica in the ledger: its limits, its last report, and what is reserved of it."""

import enum
from dataclasses import dataclass

from serve_app.routing.rate import DecayingRate
from serve_app.routing.replica import ReplicaReport, ReplicaSpec


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


@dataclass(slots=True, eq=False)
class ReplicaState:
    """One replica in the ledger.

    Attributes:
        order: order of joining; breaks ties.
        joined: it is connected; a lost replica stays until its last request has been released.
        suspended: it gets no requests until its first report at or after `suspended_until`.
        suspensions: how often it was suspended since it last began an answer.
        faults: requests in a row that failed for a fault of its own (see `dispatch.suspensions`).
        quarantined: requests in quarantine whose answer has not begun.
        unstarted: requests whose answer has not begun.
        long_prefills: prefills above `SHORT` that have not ended, and how many of them are `LONGEST`.
        dispatches: requests sent to it so far.
        dispatches_reported: `dispatches` at its last report.
        unseen: requests sent that its last report cannot have counted.
        pending_prefill_tokens: prompt tokens of the prefills that have not ended.
        reserved_tokens: kept free for one waiting request (`dispatch.capacity_reservations`).
        tpot_s: the last time per output token that it reported; None before it generated anything.
        gated: by its last reports it is too busy for more, whatever its queue.
        version: changes with its capacity; see `open_replicas`.
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

    @property
    def is_alive(self) -> bool:
        """Whether it is connected, reports and does not drain."""
        report = self.report
        return self.joined and report is not None and not (report.draining or self.stale)

    @property
    def is_usable(self) -> bool:
        """Whether the replica will take requests again, even if it has no capacity for any now."""
        return self.is_alive and not self.suspended

    @property
    def free_tokens(self) -> int:
        """Unreserved KV tokens; negative while more is kept free for a request than is unreserved."""
        return self.kv_budget - self.held_tokens - self.reserved_tokens

    @property
    def reported_queue(self) -> int:
        """Upper bound on the engine's queue from its report: what waited then, and what was sent since."""
        return self.unseen + (self.report.waiting if self.report else 0)

    def __repr__(self) -> str:
        marks = "" if self.joined else " lost"
        marks += "".join(f" {name}" for name in ("stale", "suspended") if getattr(self, name))
        return (
            f"<Replica {self.spec.replica_id} {self.spec.pool} in_flight={self.in_flight} "
            f"unstarted={self.unstarted} held={self.held_tokens}/{self.kv_budget}{marks}>"
        )
