"""The error of a replay, from what it got wrong where nothing was changed.

The unchanged replay gives each recorded request a wait, beside the one that it had. A changed replay gives
the request in question another wait. What it would really have been is

    replayed with the change + carried * (recorded - replayed without it)

where `carried` is the smaller of the two replayed waits over the larger. So a change without effect gives the
recorded wait, and one after which the request meets quite another queue gives what the replay has. Nothing is
carried where the replay does not have the wait of the request at all, since it met another queue already.

The bar is made of what the unchanged replay gets wrong in nine of ten comparable requests: of those that wait
about as long as the request would, and, as far as its own error is carried, of those that wait about as long
as it did. Both are taken as independent; errors that they share would make it smaller.

That is too little where a change moves all requests, as another policy does. Under another order other
requests depend on small delays, which the unchanged replay does not show. Who replays such a change tells
besides how much the wait depends on them, and that widens the bar.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.request import PriorityClass

LEAST_COMPARABLE = 12
"""Comparable requests without which there is no bar, and so no figure."""
_MOST_COMPARABLE = 40
_SHARE = 0.9
# Waits that differ by less are alike.
_ALIKE_S = 0.1


@dataclass(frozen=True, slots=True)
class Residual:
    """What the unchanged replay said of a request, and what happened, in seconds."""

    request_id: str
    priority: PriorityClass
    replayed_s: float
    recorded_s: float

    @property
    def error_s(self) -> float:
        """Positive where the replay is too fast."""
        return self.recorded_s - self.replayed_s


@dataclass(frozen=True, slots=True)
class Told:
    """A time that is told: about `seconds`, and in nine of ten cases between `low` and `high`."""

    seconds: float
    low: float
    high: float


class ErrorBars:
    """What a replay gets wrong.

    Args:
        residuals: of all requests but the one in question.
        own: of that one.
    """

    def __init__(self, residuals: Sequence[Residual], own: Residual) -> None:
        self._residuals, self._own = residuals, own

    @property
    def comparable(self) -> int:
        """Requests that the replay can be held against."""
        return len(self._residuals)

    @property
    def bar_s(self) -> float:
        """What the unchanged replay is off by, for nine in ten requests like the one in question."""
        return self._off_by(self._own.replayed_s, self._own.priority)

    @property
    def reproduces(self) -> bool:
        """Whether the unchanged replay has the wait of the request itself, within its own bar."""
        return abs(self._own.error_s) <= self.bar_s

    @property
    def median_error_s(self) -> float:
        """What it is off by in half of all cases."""
        errors = sorted(abs(each.error_s) for each in (*self._residuals, self._own))
        return errors[len(errors) // 2]

    def told(self, changed_s: float, priority: PriorityClass, sensitivity_s: float = 0.0) -> Told:
        """The time of the request after a change.

        Args:
            changed_s: as the changed replay has it.
            priority: the class that the request has after the change.
            sensitivity_s: by how much small delays move that time, where the change moves all requests.
        """
        own = self._own
        shorter, longer = sorted((changed_s, own.replayed_s))
        carried = (shorter / longer if longer else 1.0) if self.reproduces else 0.0
        seconds = max(0.0, changed_s + carried * own.error_s)
        bar = math.hypot(self._off_by(changed_s, priority), carried * self.bar_s, sensitivity_s)
        if not self.reproduces:
            bar = max(bar, abs(own.error_s))
        return Told(seconds, max(0.0, seconds - bar), seconds + bar)

    def _off_by(self, replayed_s: float, priority: PriorityClass) -> float:
        """What the unchanged replay gets wrong in nine of ten requests with about this wait in it.

        Those are of the same class where there are enough.
        """
        alike = [each for each in self._residuals if each.priority is priority]
        if len(alike) < LEAST_COMPARABLE:
            alike = list(self._residuals)

        def distance(each: Residual) -> float:
            return abs(math.log((each.replayed_s + _ALIKE_S) / (replayed_s + _ALIKE_S)))

        most = min(_MOST_COMPARABLE, max(LEAST_COMPARABLE, len(alike) // 3))
        near = sorted(alike, key=distance)[:most]
        return _quantile([abs(each.error_s) for each in near])


def _quantile(values: Sequence[float]) -> float:
    """The smallest value that `_SHARE` of all do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[math.ceil(_SHARE * len(ordered)) - 1] if ordered else 0.0
