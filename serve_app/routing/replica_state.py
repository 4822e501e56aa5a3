"""The books of one replica: what it is, what it said last, and what it has been promised."""

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
    """What one request is promised of a replica.

    Attributes:
        tokens: of the KV cache, as expected.
        prefill_class: of its prefill while that has not ended; `SHORT` afterwards.
        prefill_tokens: prompt tokens to compute, while its prefill has not ended.
    """

    tokens: int
    prefill_class: PrefillClass = PrefillClass.SHORT
    prefill_tokens: int = 0


@dataclass(slots=True, eq=False)
class ReplicaState:
    """One replica in the ledger.

    Attributes:
        order: position in the order of joining; breaks ties.
        joined: it is connected; a lost replica stays until its last request has been released.
        suspended: it refused or broke a request; closed until its next report.
        unstarted: requests whose answer has not begun.
        long_prefills: prefills above `SHORT` that have not ended, and those of them that are `LONGEST`.
        dispatches: requests sent to it so far.
        unseen: requests sent that its last report cannot have counted.
        pending_prefill_tokens: prompt tokens of the prefills that have not ended.
        reserved_tokens: kept free for one request that waits, see `scheduling.reservations`.
        gated: its last reports said that it is too busy, whatever its queue.
    """

    spec: ReplicaSpec
    order: int
    starts: DecayingRate
    kv_budget: int
    joined: bool = True
    stale: bool = False
    suspended: bool = False
    in_flight: int = 0
    unstarted: int = 0
    unseen: int = 0
    held_tokens: int = 0
    reserved_tokens: int = 0
    long_prefills: tuple[int, int] = (0, 0)
    dispatches: int = 0
    pending_prefill_tokens: int = 0
    gated: bool = False
    report: ReplicaReport | None = None
    reported_at: float = 0.0
    report_gap_s: float = 0.0
    version: int = 0
    received: int | None = None

    @property
    def free_tokens(self) -> int:
        """KV tokens not promised to anybody; negative while more is kept for somebody than is free."""
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
