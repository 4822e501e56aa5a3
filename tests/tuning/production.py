"""Production that executes the orders of a rollout."""

import math
from collections.abc import Callable

from serve_app.tuning.objective import Reward
from serve_app.tuning.rollout import Retune, Rollout
from serve_app.tuning.search_space import Values


def by_name(rollout: Rollout, order: Retune) -> Values:
    """Return the values of an order by the names of their parameters; it must have all of them."""
    parameters = list(rollout._space)
    assert set(order.values) == {each.path for each in parameters}
    return {each.name: order.values[each.path] for each in parameters}


class Production:
    """Current values; trial values expire, as in a scheduler."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.permanent: Values = rollout.incumbent
        self.values: Values = self.permanent
        self.expires_at = math.inf
        self.applied: list[Values] = []
        # When values became current, and whether they were the candidate's.
        self._sides: list[tuple[float, bool]] = []

    def execute(self, orders: list[Retune], now: float) -> None:
        for order in orders:
            self.values, self.expires_at = by_name(self.rollout, order), math.inf
            self.applied.append(self.values)
            self._sides.append((now, order.valid_s is not None))
            if order.valid_s is None:
                self.permanent = self.values
            else:
                self.expires_at = now + order.valid_s

    def expire(self, now: float) -> None:
        if now >= self.expires_at:
            self.values, self.expires_at = self.permanent, math.inf

    def ticked(self, now: float, completed_until: float, judge: Callable[[bool], Reward]) -> list[Retune]:
        """Tick; slices are judged by whether they had the candidate's values."""
        return self.rollout.tick(now, completed_until, lambda start, _: judge(self._was_candidate(start)))

    def tick(self, now: float, completed_until: float, judge: Callable[[bool], Reward]) -> None:
        self.execute(self.ticked(now, completed_until, judge), now)

    def _was_candidate(self, at: float) -> bool:
        return next((is_candidate for since, is_candidate in reversed(self._sides) if since <= at), False)
