"""Outages: pools without a live replica, and their expected duration.

A replica is alive while it is connected, reports its load and does not drain. During an outage a request
waits for a grace period, which covers replicas that reconnect or report late. After that it is rejected,
whether it has just arrived or has waited. An engine takes from seconds to many minutes to start, so the
client may prefer to fail over or to retry later.

The expected remaining time of an outage is the mean length of earlier ones, less its age. The first outage is
the start of the application, so the start time of an engine is known from then on. An outage that is older
than expected, and the first one, is expected to last as long again as it has lasted. Outages shorter than the
grace period say nothing about the start of an engine, and are not counted.

A pool that scales from zero *on demand* has no replica because none was needed. A request waits for its
engine to start until its own queue timeout.
"""

import math
from collections.abc import Callable, Iterable, Sequence

# Engines do not start in less time.
_MIN_S = 2.0
# Weight of one outage in the mean of their lengths.
_WEIGHT = 0.5


class Outages:
    """The pools of one model that have no live replica.

    Args:
        pools: all pools of the model; each starts without a replica.
        grace_s: how long a request may wait for a pool without a replica, in seconds.
        on_demand: pools that get their first replica when a request waits for them.

    Attributes:
        changes: number of starts and ends of outages so far.
    """

    def __init__(
        self, pools: Iterable[str], grace_s: float, now: float, on_demand: Iterable[str] = ()
    ) -> None:
        self._pools = tuple(pools)
        self._on_demand = frozenset(on_demand)
        self._grace_s = grace_s
        self._since = dict.fromkeys(self._pools, now)
        # Time at which the grace period of a pool ends; removed once its requests have been rejected.
        self._ends_at = dict.fromkeys(self._pools, now + grace_s)
        self._mean_s: float | None = None
        self.changes = 0

    def observe(self, has_alive: Callable[[str], bool], now: float) -> None:
        """Update which pools have a live replica."""
        for pool in self._pools:
            since = self._since.get(pool)
            if has_alive(pool):
                if since is not None:
                    self.changes += 1
                    self._end(pool, now - since)
            elif since is None:
                self.changes += 1
                self._since[pool] = now
                self._ends_at[pool] = now + self._grace_s

    def all_down(self, pools: Iterable[str]) -> bool:
        """Return whether none of these pools has a live replica."""
        return all(pool in self._since for pool in pools)

    def must_reject(self, pools: Sequence[str], now: float) -> bool:
        """Return whether all pools have been down for the grace period and none starts on demand."""
        if (pools and not self._since) or not self._on_demand.isdisjoint(pools):
            return False
        return all(now >= self._since.get(pool, math.inf) + self._grace_s for pool in pools)

    def next_at(self) -> float | None:
        """Return the next end of a grace period, or None if no outage is within its grace period."""
        return min(self._ends_at.values()) if self._ends_at else None

    def pop_due(self, now: float) -> bool:
        """Return whether the grace period of a pool has ended since the last call."""
        if not self._ends_at:
            return False
        due = [pool for pool, ends_at in self._ends_at.items() if ends_at <= now]
        for pool in due:
            del self._ends_at[pool]
        return bool(due)

    def age_s(self, pools: Iterable[str], now: float) -> float:
        """Return the seconds since the last of these pools lost its last replica."""
        return now - max(self._since.get(pool, now) for pool in pools)

    def expected_remaining_s(self, pools: Iterable[str], now: float) -> float:
        """Return the expected seconds until one of these pools has a live replica again."""
        return min(self._expected_remaining_s(now - self._since.get(pool, now)) for pool in pools)

    def describe(self, model: str, pools: Iterable[str], now: float) -> str:
        """Return a description of the outage for a client."""
        suitable = "" if self.all_down(self._pools) else " that can serve this request"
        return (
            f"{model} has had no live replica{suitable} for {self.age_s(pools, now):.1f} s: its engines are "
            "starting or being replaced; retry after the delay in Retry-After"
        )

    def _expected_remaining_s(self, age_s: float) -> float:
        mean_s = self._mean_s or 0.0
        return max(mean_s - age_s if age_s < mean_s else age_s, _MIN_S)

    def _end(self, pool: str, lasted_s: float) -> None:
        del self._since[pool]
        self._ends_at.pop(pool, None)
        if lasted_s > self._grace_s:
            mean_s = lasted_s if self._mean_s is None else self._mean_s
            self._mean_s = mean_s + _WEIGHT * (lasted_s - mean_s)

    def __repr__(self) -> str:
        return f"<Outages {sorted(self._since)} mean={self._mean_s}>"
