"""The error of a replay, from what it got wrong where nothing was changed.

The unchanged replay gives each recorded request a wait, beside the one that it had. A changed replay gives
the request in question another wait. What it would really have been is

    replayed with the change + carried * (recorded - replayed without it)

where `carried` is the share of its wait that is left, at most 1. So a change without effect gives the
recorded wait, and where nothing of the wait is left nothing of its error is, either.

The bar is what the same formula gets wrong among comparable requests. One of a pair has about the wait that
the change gives, the other about the wait without it; nine in ten pairs are off by no more than the bar.
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
        near = self._near(self._own.replayed_s, self._own.priority)
        return _quantile([abs(each.error_s) for each in near])

    @property
    def reproduces(self) -> bool:
        """Whether the unchanged replay has the wait of the request itself, within its own bar."""
        return abs(self._own.error_s) <= self.bar_s

    @property
    def median_error_s(self) -> float:
        """What it is off by in half of all cases."""
        errors = sorted(abs(each.error_s) for each in (*self._residuals, self._own))
        return errors[len(errors) // 2]

    def told(self, changed_s: float, priority: PriorityClass) -> Told:
        """The time of the request after a change.

        Args:
            changed_s: as the changed replay has it.
            priority: the class that the request has after the change.
        """
        own = self._own
        carried = 1.0 if changed_s >= own.replayed_s else changed_s / own.replayed_s
        seconds = max(0.0, changed_s + carried * own.error_s)
        before = self._near(own.replayed_s, own.priority)
        after = self._near(changed_s, priority)
        bar = _quantile(
            [
                abs(one.error_s - carried * other.error_s)
                for one in after
                for other in before
                if one.request_id != other.request_id
            ]
        )
        if not self.reproduces:
            bar = max(bar, abs(own.error_s))
        return Told(seconds, max(0.0, seconds - bar), seconds + bar)

    def _near(self, replayed_s: float, priority: PriorityClass) -> list[Residual]:
        """The requests with about the same wait in the replay, of the same class where there are enough."""
        alike = [each for each in self._residuals if each.priority is priority]
        if len(alike) < LEAST_COMPARABLE:
            alike = list(self._residuals)

        def distance(each: Residual) -> float:
            return abs(math.log((each.replayed_s + _ALIKE_S) / (replayed_s + _ALIKE_S)))

        most = min(_MOST_COMPARABLE, max(LEAST_COMPARABLE, len(alike) // 4))
        return sorted(alike, key=distance)[:most]


def _quantile(values: Sequence[float]) -> float:
    """The smallest value that `_SHARE` of all do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[math.ceil(_SHARE * len(ordered)) - 1] if ordered else 0.0
