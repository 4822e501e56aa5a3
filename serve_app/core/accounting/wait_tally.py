"""The tally of one request: its wait so far by cause, and what its account stood at when it began to wait."""

from typing import TYPE_CHECKING

from serve_app.core.accounting.wait_causes import WaitBreakdown, WaitCause

if TYPE_CHECKING:
    from serve_app.core.accounting.waits import WaitAccount


class WaitTally:
    """What is known of one request's wait.

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
        """All that has been added so far, in nanoseconds."""
        return sum(self._causes.values())

    def add(self, cause: WaitCause, nanoseconds: int) -> None:
        """So much of the wait had this cause."""
        if nanoseconds:
            self._causes[cause] = self._causes.get(cause, 0) + nanoseconds

    def add_ahead(self, cause: WaitCause, places: int) -> None:
        """So many others took a place meanwhile."""
        if places:
            self._ahead[cause] = self._ahead.get(cause, 0) + places

    def copy(self) -> "WaitTally":
        """Another one that stands as this one does."""
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
        """What has been added so far."""
        return WaitBreakdown(self._causes.copy(), self._ahead.copy())

    def __repr__(self) -> str:
        return f"<WaitTally {self._causes}>"
