"""What can keep a request waiting, and how a wait is divided among those causes."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve_app.core.accounting.waits import WaitAccount


class WaitCause(enum.StrEnum):
    """What a request waited for. The first four are matters of order: others went first."""

    HIGHER_CLASS = "higher_class"
    """A place in an engine came free, and a request of a higher class got it."""
    OTHER_TENANTS = "other_tenants"
    """A request of another tenant of its class got the place."""
    OWN_REQUESTS = "own_requests"
    """Another request of its own tenant and class got the place."""
    LOWER_CLASS = "lower_class"
    """A request of a lower class got the place: its floor share, or it had waited too long."""
    ENGINES_BUSY = "engines_busy"
    """No engine took more, until this request got the next place."""
    LONG_PREFILL = "long_prefill"
    """It has a long prompt, and as many long prefills as are allowed were under way."""
    KV_CACHE = "kv_cache"
    """The free places had too little KV cache for it."""
    ENGINE_QUEUE = "engine_queue"
    """Batch work waits for an engine without a queue of its own."""
    PARTICULAR_REPLICA = "particular_replica"
    """Only some replicas will do for it, for an adapter or a stored response, and those took nothing."""
    NO_REPLICA = "no_replica"
    """No replica of its pools was connected."""
    STALE_REPORT = "stale_report"
    """The replicas were connected, and did not report, or drained."""
    FAILING_REPLICAS = "failing_replicas"
    """The replicas were suspended because they failed, or gave no sign."""
    BACKOFF = "backoff"
    """It had come back from more than one replica, and rested before the next try."""
    EARLIER_ATTEMPT = "earlier_attempt"
    """It was on a replica that gave it back."""
    BEFORE_SCHEDULER = "before_scheduler"
    """Before this scheduler knew of it: a scheduler that has been replaced since may have held it."""

    @property
    def meaning(self) -> str:
        """What it means, in words for a reader of a receipt."""
        return _MEANINGS[self]


_MEANINGS = {
    WaitCause.HIGHER_CLASS: "requests of a higher class took the places that came free",
    WaitCause.OTHER_TENANTS: "requests of other tenants took the places that came free",
    WaitCause.OWN_REQUESTS: "other requests of the same tenant took the places that came free",
    WaitCause.LOWER_CLASS: "requests of a lower class, which were owed it, took the places that came free",
    WaitCause.ENGINES_BUSY: "no engine took more requests",
    WaitCause.LONG_PREFILL: "as many long prefills as are allowed were under way",
    WaitCause.KV_CACHE: "no engine had enough KV cache free",
    WaitCause.ENGINE_QUEUE: "batch work waits for an engine without a queue of its own",
    WaitCause.PARTICULAR_REPLICA: "the replicas that hold what it needs took no more requests",
    WaitCause.NO_REPLICA: "no replica was connected",
    WaitCause.STALE_REPORT: "the replicas did not report, or drained",
    WaitCause.FAILING_REPLICAS: "the replicas were suspended after failures",
    WaitCause.BACKOFF: "it rested after coming back from replicas",
    WaitCause.EARLIER_ATTEMPT: "it was on a replica that gave it back",
    WaitCause.BEFORE_SCHEDULER: "another scheduler held it, or it was on its way",
}


@dataclass(frozen=True, slots=True)
class WaitBreakdown:
    """Where a wait went.

    Attributes:
        causes: nanoseconds by cause, without those that are 0. They add up to the time since the arrival.
        ahead: how many requests took a place in its pool meanwhile that it could have had, by cause.
    """

    causes: dict[WaitCause, int] = field(default_factory=dict)
    ahead: dict[WaitCause, int] = field(default_factory=dict)

    @property
    def wait_s(self) -> float:
        """The sum of all causes, in seconds."""
        return sum(self.causes.values()) / 1e9

    @property
    def main_cause(self) -> WaitCause | None:
        """The cause of most of it; None where there was no wait."""
        return max(self.causes, key=self.causes.__getitem__, default=None)


def nanoseconds(at: float) -> int:
    """A time in seconds as a whole number, so that sums of differences are exact."""
    return int(at * 1e9)


# The tally of one request: its wait so far by cause, and what its account stood at when it began to wait.


class WaitTally:
    """The wait of one request so far, by cause.

    Attributes:
        account: the account that it waits by; None while it rests or runs.
        sums: what the account stood at when the request joined it.
        own: the same, of the places that its own tenant took: nanoseconds and number.
        resting_since: when its backoff began, in nanoseconds; None outside of one.
    """

    __slots__ = ("_ahead", "_causes", "account", "own", "resting_since", "sums")

    def __init__(self) -> None:
        self.account: WaitAccount | None = None
        self.sums: list[int] = []
        self.own = (0, 0)
        self.resting_since: int | None = None
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
        """Count others that took a place during the wait."""
        if places:
            self._ahead[cause] = self._ahead.get(cause, 0) + places

    def copy(self) -> "WaitTally":
        """Return an independent copy."""
        same = WaitTally()
        same.account, same.sums, same.own, same.resting_since = (
            self.account,
            self.sums,
            self.own,
            self.resting_since,
        )
        same._causes, same._ahead = self._causes.copy(), self._ahead.copy()
        return same

    def breakdown(self) -> WaitBreakdown:
        """Return the causes added so far."""
        return WaitBreakdown(self._causes.copy(), self._ahead.copy())

    def __repr__(self) -> str:
        return f"<WaitTally {self._causes}>"
