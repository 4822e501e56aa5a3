"""Accounts of one request: the causes of its waits, and its share of the engine's time.

- `WaitTally`: divides the wait of one request among its causes (`WaitBreakdown`).
- `EngineShare`: the engine time that one request uses on its replica (see `costs`).
"""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve_app.core.accounting.waits import WaitAccount


class WaitCause(enum.StrEnum):
    """A cause of a wait. The first five mean that a slot became free and another request got it."""

    HIGHER_CLASS = "higher_class"
    """A request of a higher class got the slot."""
    OTHER_TENANTS = "other_tenants"
    """A request of another tenant of the same class got the slot."""
    OWN_REQUESTS = "own_requests"
    """Another request of the same tenant and class got the slot."""
    LOWER_CLASS = "lower_class"
    """A request of a lower class got the slot, because of its class floor or its starvation bound."""
    OTHERS_FLOOR = "others_floor"
    """A request of a tenant or class that was behind its floor got the slot."""
    ENGINES_BUSY = "engines_busy"
    """No engine accepted more requests. This request got the next slot."""
    LONG_PREFILL = "long_prefill"
    """It has a long prompt, and the maximum number of long prefills was in flight."""
    KV_CACHE = "kv_cache"
    """The free slots had too little KV cache for it."""
    ENGINE_QUEUE = "engine_queue"
    """Batch work waits for capacity that other requests leave."""
    PARTICULAR_REPLICA = "particular_replica"
    """Only the replicas with its adapter or stored response can serve it, and they accepted nothing."""
    RESIDENCY = "residency"
    """It is a turn of a program, and the KV caches had no room for its context, or the replica that has its
    context accepted nothing."""
    NO_REPLICA = "no_replica"
    """No replica of its pools was connected."""
    STALE_REPORT = "stale_report"
    """The connected replicas did not report their load or were draining."""
    FAILING_REPLICAS = "failing_replicas"
    """The replicas were suspended after failures, or hung."""
    BACKOFF = "backoff"
    """It was put back by more than one replica and waited for its backoff to end."""
    EARLIER_ATTEMPT = "earlier_attempt"
    """It was in flight on a replica that put it back."""
    REVOKED = "revoked"
    """It ran on a replica until a request of a higher class needed its capacity, or the replica drained."""
    BEFORE_SCHEDULER = "before_scheduler"
    """Time before this scheduler received it, for example in the queue of the scheduler it replaced."""

    @property
    def meaning(self) -> str:
        """The cause in words, for readers of a receipt."""
        return _MEANINGS[self]


_MEANINGS = {
    WaitCause.HIGHER_CLASS: "requests of a higher class got the free slots",
    WaitCause.OTHER_TENANTS: "requests of other tenants got the free slots",
    WaitCause.OWN_REQUESTS: "other requests of the same tenant got the free slots",
    WaitCause.LOWER_CLASS: "requests of a lower class got the free slots, by class floor or starvation bound",
    WaitCause.OTHERS_FLOOR: "requests of a tenant or class with a floor got the free slots",
    WaitCause.ENGINES_BUSY: "no engine accepted more requests",
    WaitCause.LONG_PREFILL: "the maximum number of long prefills was in flight",
    WaitCause.KV_CACHE: "no engine had enough KV cache free",
    WaitCause.ENGINE_QUEUE: "batch work waited for capacity that other requests leave",
    WaitCause.PARTICULAR_REPLICA: "no replica with its adapter or stored response accepted more requests",
    WaitCause.RESIDENCY: "the KV caches had no room for the context of its program",
    WaitCause.NO_REPLICA: "no replica was connected",
    WaitCause.STALE_REPORT: "the replicas did not report or were draining",
    WaitCause.FAILING_REPLICAS: "the replicas were suspended after failures or hung",
    WaitCause.BACKOFF: "it was in backoff after put-backs",
    WaitCause.EARLIER_ATTEMPT: "it was on a replica that put it back",
    WaitCause.REVOKED: "it ran until its replica drained, or requests of a higher class needed its capacity",
    WaitCause.BEFORE_SCHEDULER: "it was in transit or queued in another scheduler",
}


@dataclass(frozen=True, slots=True)
class WaitBreakdown:
    """The causes of one wait.

    Attributes:
        causes: nanoseconds by cause, without zeros. They add up to the time since arrival.
        ahead: requests that took a slot in its pool during the wait that it could have had, by cause.
    """

    causes: dict[WaitCause, int] = field(default_factory=dict)
    ahead: dict[WaitCause, int] = field(default_factory=dict)

    @property
    def wait_s(self) -> float:
        """The sum of all causes, in seconds."""
        return sum(self.causes.values()) / 1e9

    @property
    def main_cause(self) -> WaitCause | None:
        """The cause of the largest part; None if there was no wait."""
        return max(self.causes, key=self.causes.__getitem__, default=None)


def nanoseconds(at: float) -> int:
    """Return a time in whole nanoseconds, so that sums of differences are exact."""
    return int(at * 1e9)


OwnSlots = tuple[tuple[int, int], tuple[int, int]]
"""Nanoseconds and number of the slots that a tenant took in its turn, and by a floor."""
NO_SLOTS: OwnSlots = ((0, 0), (0, 0))


class WaitTally:
    """The wait of one request so far, by cause.

    Attributes:
        account: the wait account that it has joined; None during backoff or on a replica.
        sums: sums of the account when the request joined it.
        own: the same for the slots that its tenant took.
        held_since: start of its backoff or of its parking, in nanoseconds; None outside of them.
        held_for: the cause of that time.
    """

    __slots__ = ("_ahead", "_causes", "account", "held_for", "held_since", "own", "sums")

    def __init__(self) -> None:
        self.account: WaitAccount | None = None
        self.sums: list[int] = []
        self.own = NO_SLOTS
        self.held_since: int | None = None
        self.held_for = WaitCause.BACKOFF
        self._causes: dict[WaitCause, int] = {}
        self._ahead: dict[WaitCause, int] = {}

    @property
    def total(self) -> int:
        """The wait added so far, in nanoseconds."""
        return sum(self._causes.values())

    def add(self, cause: WaitCause, nanoseconds: int) -> None:
        """Add a part of the wait to its cause."""
        if nanoseconds:
            self._causes[cause] = self._causes.get(cause, 0) + nanoseconds

    def add_ahead(self, cause: WaitCause, places: int) -> None:
        """Count requests that took a slot during the wait."""
        if places:
            self._ahead[cause] = self._ahead.get(cause, 0) + places

    def copy(self) -> "WaitTally":
        """Return an independent copy."""
        same = WaitTally()
        same.account, same.sums, same.own = self.account, self.sums, self.own
        same.held_since, same.held_for = self.held_since, self.held_for
        same._causes, same._ahead = self._causes.copy(), self._ahead.copy()
        return same

    def breakdown(self) -> WaitBreakdown:
        """Return the causes added so far."""
        return WaitBreakdown(self._causes.copy(), self._ahead.copy())

    def __repr__(self) -> str:
        return f"<WaitTally {self._causes}>"


class ReplicaTime:
    """The time of one replica since it was last idle.

    Attributes:
        at: time of the last update, in seconds.
        undivided_s: time not yet divided.
        reserved_s: excess of the prefills in progress.
    """

    __slots__ = ("at", "common_s", "requests", "reserved_s", "undivided_s")

    def __init__(self, now: float) -> None:
        self.at = now
        self.undivided_s = 0.0
        self.reserved_s = 0.0
        self.common_s = 0.0
        self.requests = 0

    def __repr__(self) -> str:
        return f"<ReplicaTime at {self.at}: undivided {self.undivided_s} s, {self.requests} requests>"

    def advance(self, now: float) -> None:
        """Add the time since the last update, and divide what is not reserved for prefills in progress."""
        undivided_s, reserved_s = self.undivided_s + now - self.at, self.reserved_s
        self.at = now
        if undivided_s > reserved_s:
            self.common_s += (undivided_s - reserved_s) / self.requests
            self.undivided_s = reserved_s
        else:
            self.undivided_s = undivided_s


class EngineShare:
    """The account of one request on one replica.

    Attributes:
        since: common clock at its dispatch, in seconds.
        compute_s: time to compute its prompt.
        read_s: time to read the weights in the steps that its prompt takes.
        prefills: prefills in progress on the replica at its dispatch, this one included.
        reserved_s: undivided time reserved for its prefill; 0 once that is charged.
        charged_s: time charged for its prefill.
    """

    __slots__ = ("charged_s", "compute_s", "prefills", "read_s", "reserved_s", "since", "time")

    def __init__(self, time: ReplicaTime, compute_s: float, read_s: float, prefills: int) -> None:
        self.time = time
        self.since = time.common_s
        self.compute_s = compute_s
        self.read_s = read_s
        self.prefills = prefills
        self.charged_s = 0.0
        self.reserved_s = reserved_s = self.excess_s(prefills)
        time.reserved_s += reserved_s

    def __repr__(self) -> str:
        return f"<EngineShare since {self.since}, reserved {self.reserved_s} s, charged {self.charged_s} s>"

    def excess_s(self, prefills: float) -> float:
        """Return the time that the prompt adds to its steps if `prefills` prefills share them."""
        return max(0.0, self.compute_s - self.read_s / prefills)

    def charge(self, seconds: float) -> None:
        """Charge `seconds` for the completed prefill, at most the undivided time."""
        time = self.time
        charged = min(seconds, time.undivided_s)
        self.charged_s += charged
        time.undivided_s -= charged
        # Rounding errors of the sums could make this negative.
        time.reserved_s = max(0.0, time.reserved_s - self.reserved_s)
        self.reserved_s = self.compute_s = 0.0
