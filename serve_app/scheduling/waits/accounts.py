"""The wait accounts of a queue: who joins which, and what each request's wait adds up to."""

from collections.abc import Iterator

from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.waits.account import WaitAccount, WaitAccountKey, key_of
from serve_app.scheduling.waits.causes import WaitBreakdown, WaitCause, nanoseconds
from serve_app.scheduling.waits.tally import WaitTally

# One that is dispatched by the event with which it comes has not waited; a live clock runs on meanwhile.
_NO_WAIT_S = 1e-3


class WaitAccounts:
    """The accounts of all kinds of requests that wait now.

    Attributes:
        opened: how many have been opened so far.
    """

    def __init__(self) -> None:
        self._accounts: dict[WaitAccountKey, WaitAccount] = {}
        self._new: list[ScheduledRequest] = []
        self.opened = 0

    def __repr__(self) -> str:
        return f"<WaitAccounts {list(self)}>"

    def __iter__(self) -> Iterator[WaitAccount]:
        return iter(self._accounts.values())

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def are_idle(self) -> bool:
        """Whether nobody waits, and nobody has come."""
        return not (self._accounts or self._new)

    def add(self, scheduled: ScheduledRequest) -> None:
        """A request has come into the queue; it begins to wait if it is still there after the event."""
        self._new.append(scheduled)

    def remove(self, scheduled: ScheduledRequest, now: float) -> None:
        """A request has left the queue, or the kind that it was of."""
        tally = scheduled.waits
        if tally is None:
            return
        at = nanoseconds(now)
        if (account := tally.account) is not None:
            account.leave(scheduled, tally, at)
            if not account.waiting:
                del self._accounts[account.key]
        elif tally.resting_since is not None:
            tally.add(WaitCause.BACKOFF, at - tally.resting_since)
            tally.resting_since = None

    def join(self, now: float) -> None:
        """Those that came with an event, and still wait after it, begin to wait."""
        if not self._new:
            return
        at = nanoseconds(now)
        for scheduled in self._new:
            if not scheduled.queued:
                continue
            tally = _tally(scheduled, now)
            if scheduled.resting_until:
                tally.resting_since = at
            elif tally.account is None:
                key = key_of(scheduled)
                account = self._accounts.get(key)
                if account is None:
                    account = self._accounts[key] = WaitAccount(key, at)
                    self.opened += 1
                account.join(scheduled, tally, at)
        self._new.clear()


def waits_for(scheduled: ScheduledRequest) -> WaitCause:
    """What a request in the queue waits for now, between two events."""
    tally = scheduled.waits
    if tally is None or tally.account is None:
        # Without an account it rests after failures.
        return WaitCause.BACKOFF
    return tally.account.cause


def note_attempt(scheduled: ScheduledRequest, now: float) -> None:
    """A replica has given a request back: it was there since its dispatch."""
    tally = _tally(scheduled, scheduled.dispatched_at)
    tally.add(WaitCause.EARLIER_ATTEMPT, nanoseconds(now) - nanoseconds(scheduled.dispatched_at))


def wait_breakdown(scheduled: ScheduledRequest, now: float) -> WaitBreakdown | None:
    """Where the wait of a request went that has left the queue; None when it did not wait."""
    if scheduled.waits is None and now - scheduled.request.arrived_at < _NO_WAIT_S:
        return None
    return _tally(scheduled, now).breakdown()


def wait_so_far(scheduled: ScheduledRequest, now: float) -> WaitBreakdown:
    """Where the wait of a request in the queue went up to now; changes nothing."""
    if scheduled.waits is None:
        return WaitBreakdown()
    tally, at = scheduled.waits.copy(), nanoseconds(now)
    if tally.account is not None:
        tally.account.divide(scheduled, tally, at)
    elif tally.resting_since is not None:
        tally.add(WaitCause.BACKOFF, at - tally.resting_since)
    return tally.breakdown()


def _tally(scheduled: ScheduledRequest, until: float) -> WaitTally:
    """Its tally, in which all is accounted for until a time: what is not was before this scheduler's."""
    tally = scheduled.waits
    if tally is None:
        tally = scheduled.waits = WaitTally()
    if tally.account is None and tally.resting_since is None:
        known = nanoseconds(scheduled.request.arrived_at) + tally.total
        tally.add(WaitCause.BEFORE_SCHEDULER, nanoseconds(until) - known)
    return tally
